"""A session as a synchronous client holds it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shmsched.client.core import BLOCK_TIMEOUT_S
from shmsched.client.futures import StepFuture, WaitingStream
from shmsched.client.generation import Drafter, EngineDraft, Generation, LogitsProcessor
from shmsched.client.generation.start import OnSessionLost, start
from shmsched.client.session_core import SessionCore
from shmsched.client.state import MakeSession, Opening
from shmsched.params import GREEDY, OutputRows, SamplingParams
from shmsched.steps import Tokens
from shmsched.wire import frames

if TYPE_CHECKING:
    from shmsched.client.client import Client
    from shmsched.client.models import Model

_CLOSING_S = 60.0
"""How long a call waits for a dropped generation's last step; then it says that the session is generating."""


class Session(SessionCore):
    """One sequence's state in one engine. Made by ``Client.open_session``; use it in a ``with`` block or ``close()`` it.

    It may be used from any thread. ``position`` is where the next submission starts.
    """

    def __init__(
        self, client: Client, session_id: int, model: Model, engine: int, seed: int, options: bytes = b""
    ) -> None:
        super().__init__(session_id, model, engine, seed, options)
        self._client = client
        self._closing: threading.Thread | None = None
        """Closes a generation that was dropped where its finalizer could not wait."""

    def __del__(self) -> None:
        client = getattr(self, "_client", None)
        if client is not None and self.ended is None:
            client._session_collected(self)

    def submit(
        self,
        tokens: Tokens,
        *,
        position: int | None = None,
        sampling: SamplingParams | None = GREEDY,
        output_rows: OutputRows = OutputRows.LAST,
        deadline: float | None = None,
        block: bool = True,
        block_timeout: float | None = BLOCK_TIMEOUT_S,
    ) -> StepFuture:
        """Append ``tokens`` to the session; the future resolves to the :class:`Response` of the last of them.

        tokens: any sequence of integers, or a 1-D array of any integer dtype. More than the model's
            ``max_prefill_chunk_size`` are split into chunks, of which only the last has output rows.
        position: where they start, if not at ``self.position``; below it, the session is rewound first.
        sampling: None for the raw distribution, ``response.logits``.
        output_rows: ALL must fit one chunk.
        deadline: a time of ``time.monotonic()``. What was not handed to an engine by then fails with DeadlineExceeded.
        block, block_timeout: whether and for how many seconds (None: without end) to wait for room.

        Raises InvalidRequest, Unsupported, Full, SessionClosed, SessionLost, SchedulerDied: nothing was submitted then.
        """
        if self._closing is not None:
            self._let_close()
        return self._client._submit(self, tokens, position, sampling, output_rows, deadline, block, block_timeout)

    def stream(
        self,
        tokens: Tokens,
        *,
        further: int,
        stop_tokens: tuple[int, ...] = (),
        sampling: SamplingParams = GREEDY,
        deadline: float | None = None,
        block: bool = True,
        block_timeout: float | None = BLOCK_TIMEOUT_S,
    ) -> WaitingStream:
        """Append ``tokens``, then let the scheduler go on by itself: it feeds each token that is sampled, up to ``further`` of
        them, until one of ``stop_tokens`` (at most 16) is sampled. So the stream gives up to ``further + 1`` tokens, of which
        the last is not fed. What ``generate`` is built on. Raises as ``submit``.
        """
        if self._closing is not None:
            self._let_close()
        return self._client._stream(self, tokens, sampling, further, stop_tokens, deadline, block, block_timeout)

    def generate(
        self,
        prompt_tokens: Tokens,
        *,
        max_new_tokens: int,
        sampling: SamplingParams = GREEDY,
        stop_tokens: Collection[int] | None = None,
        stop: Sequence[str] = (),
        logits_processor: LogitsProcessor | None = None,
        draft: Drafter | EngineDraft | None = None,
        on_session_lost: OnSessionLost = "raise",
        deadline: float | None = None,
        continuation: bool = True,
    ) -> Generation:
        """Feed the prompt and give the tokens that follow it, as they come: iterate over what this returns.

        prompt_tokens: may be empty where a generation has left a token that was sampled and not fed: that is fed first.
        max_new_tokens: how many tokens to sample at most; a full session ends it earlier.
        stop_tokens: end it, and are not given; None: the model's own.
        stop: texts that end it, wherever tokens divide them. Tokens that may be the beginning of one are held back.
        logits_processor: changes each row of raw logits; the client samples from what it returns, as the engine would.
        draft: guesses that the model verifies many at a time: fewer steps for the same tokens.
        on_session_lost: "replay" opens another session when an engine is lost, feeds it what this one held and goes on.
        deadline: a time of ``time.monotonic()``; a step that was not handed to an engine by then fails.
        continuation: let the scheduler go from token to token by itself, where nothing above forbids it.

        A generation that ``max_new_tokens`` cuts within a character, or where a stop text may have begun, holds that text back:
        what is held back belongs to the session, and comes with its next generation, if that has no prompt. A prompt or anything
        else that is submitted before drops it, as does rewinding; a fork that holds all of the session inherits it.

        Raises InvalidRequest or Unsupported for what can never be done, and what ``submit`` raises.
        """
        self._let_close()
        self._client._settle(self)
        begun = start(
            self, prompt_tokens, max_new_tokens, sampling, stop_tokens, stop, logits_processor, draft, on_session_lost, continuation
        )  # fmt: skip
        return Generation(self, *begun, deadline)

    def fork(
        self, upto: int | None = None, *, seed: int | None = None, block: bool = True, timeout: float | None = None
    ) -> Session:
        """Another session that begins with this one's first ``upto`` tokens (None: all), and goes its own way from there. With all of
        them it also has what a generation sampled last, which was not fed yet, and what that held back of its text.

        It waits until they have run. The engine copies them if it can; else they are prefilled again from ``history``, in
        whatever engine of the model has room. seed: of the new session's sampling; None draws one. block, timeout: as for
        ``Client.open_session``. Raises what that raises, and what the prefill does.
        """
        self._let_close()
        return self._client._fork(self, upto, seed, block, timeout)

    def close(self) -> None:
        """End the session. What is outstanding fails with SessionClosed. Idempotent."""
        self._client._close_session(self)

    def reopen(self, timeout: float | None = None) -> None:
        """After SessionLost: stand for a new, empty session of the same model, options and seed, on a living engine.

        Raises what ``Client.open_session`` raises.
        """
        self._client._reopen(self, timeout)

    @property
    def position(self) -> int:
        self._let_close()
        return super().position

    @property
    def history(self) -> npt.NDArray[np.int32]:
        self._let_close()
        return super().history

    def _let_close(self) -> None:
        """Wait until a dropped generation has let go of the session, unless that waits for this very thread."""
        closing = self._closing
        if closing is None or closing is threading.current_thread() or self._client._holds_up_others():
            return
        if closing.is_alive():
            closing.join(_CLOSING_S)
        self._closing = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def session_maker(client: Client) -> MakeSession:
    """Makes sessions for the client, and does not keep it alive."""
    reference = weakref.ref(client)

    def make_session(opened: frames.SessionOpened, asked: Opening) -> Session | None:
        client = reference()
        if client is None:
            return None
        model = client._model_of(opened)
        return Session(client, opened.session, model, opened.engine, asked.seed, asked.options)

    return make_session

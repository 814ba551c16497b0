"""What sessions of both kinds of client are called for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shmsched.client.core import BLOCK_TIMEOUT_S
from shmsched.client.generation.drafting import Drafter, EngineDraft
from shmsched.client.generation.start import OnSessionLost, start
from shmsched.client.generation.stepping import LogitsProcessor
from shmsched.client.opening import OpenedT, SessionOpener
from shmsched.client.submission import checked_deadline, continued
from shmsched.client.submitting import StepT, StreamT
from shmsched.dataplane.session_core import SessionCore
from shmsched.params import GREEDY, OutputRows, SamplingParams
from shmsched.steps import Tokens

if TYPE_CHECKING:
    from shmsched.client.models import Model

GenerationT = TypeVar("GenerationT")


class ClientSession(SessionCore, Generic[StepT, StreamT, GenerationT, OpenedT]):
    """One sequence's state in one engine, and the client that holds it."""

    _client: SessionOpener[Any, StepT, StreamT, OpenedT, Any]
    _generation: Callable[..., GenerationT]
    _guarded: object = None
    """None if ``_guard`` has nothing to do."""

    def __init__(
        self, client: Any, session_id: int, model: Model, engine: int, seed: int, options: bytes = b""
    ) -> None:
        super().__init__(session_id, model, engine, seed, options)
        self._client = client

    def __del__(self) -> None:
        client = getattr(self, "_client", None)
        if client is not None and self.ended is None:
            client._session_collected(self)

    @abstractmethod
    def _guard(self) -> None:
        """What a call begins with: wait for what would be in its way, or refuse it."""

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
    ) -> StepT:
        """Append ``tokens`` to the session; the future resolves to the :class:`Response` of the last of them. Of an ``AsyncSession``,
        ``await`` it; a task that is cancelled as it waits for it cancels the step, and the session goes on from where that started.

        They are submitted by the call; where an ``AsyncSession`` has no room for them, they stand in line from then on. Steps run in
        the order of the calls, whichever is waited for first, and also if none is.

        tokens: any sequence of integers, or a 1-D array of any integer dtype. More than the model's
            ``max_prefill_chunk_size`` are split into chunks, of which only the last has output rows.
        position: where they start, if not at ``self.position``; below it, the session is rewound first.
        sampling: None for the raw distribution, ``response.logits``.
        output_rows: ALL must fit one chunk.
        deadline: a time of ``time.monotonic()``. What was not handed to an engine by then fails with DeadlineExceeded.
        block, block_timeout: whether and for how many seconds (None: without end) to wait for room.

        Raises InvalidRequest, Unsupported, Full, SessionClosed, SessionLost, SchedulerDied: nothing was submitted then.
        """
        if self._guarded is not None:
            self._guard()
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
    ) -> StreamT:
        """Append ``tokens``, then let the scheduler go on by itself: it feeds each token that is sampled, up to ``further`` of
        them, until one of ``stop_tokens`` (at most 16) is sampled. So the stream gives up to ``further + 1`` tokens, of which
        the last is not fed. What ``generate`` is built on. Raises as ``submit``. Of an ``AsyncSession``, ``await`` it for the stream.
        """
        if self._guarded is not None:
            self._guard()
        submission = continued(self, tokens, sampling, further, stop_tokens, deadline, None)
        return self._client._put_stream(submission, block, block_timeout)

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
    ) -> GenerationT:
        """Feed the prompt and give the tokens that follow it, as they come: iterate over what this returns. Of an ``AsyncSession`` it
        begins with the first token asked for.

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
        self._guard()
        if deadline is not None:
            deadline = checked_deadline(deadline)
        # A generation whose tokens have all come may have only its end left.
        self._client._channel.under_lock(self.settle)
        begun = start(
            self, prompt_tokens, max_new_tokens, sampling, stop_tokens, stop, logits_processor, draft, on_session_lost, continuation
        )  # fmt: skip
        return self._generation(self, begun, deadline)

    def fork(
        self, upto: int | None = None, *, seed: int | None = None, block: bool = True, timeout: float | None = None
    ) -> OpenedT:
        """Another session that begins with this one's first ``upto`` tokens (None: all), and goes its own way from there. With all of
        them it also has what a generation sampled last, which was not fed yet, and what that held back of its text.

        It waits until they have run. The engine copies them if it can; else they are prefilled again from ``history``, in
        whatever engine of the model has room. seed: of the new session's sampling; None draws one. block, timeout: as for
        ``Client.open_session``. Raises what that raises, and what the prefill does.
        """
        self._guard()
        return self._client._open_by(self._client._forking, self, upto, seed, block, timeout)

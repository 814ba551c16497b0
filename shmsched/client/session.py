"""A session as its client holds it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from shmsched.client.futures import StepFuture
from shmsched.errors import SessionClosed, ShmschedError
from shmsched.steps import GREEDY, OutputRows, SamplingParams, Tokens

if TYPE_CHECKING:
    from shmsched.client.client import Client
    from shmsched.client.models import Model


class Session:
    """One sequence's state in one engine. Made by ``Client.open_session``; use it in a ``with`` block or ``close()`` it.

    It may be used from any thread. ``position`` is where the next submission starts.
    """

    def __init__(self, client: Client, session_id: int, model: Model, engine: int, seed: int) -> None:
        self.session_id = session_id
        """The client's number for it: what a ``Request`` names."""
        self.model = model
        self.engine = engine
        """The daemon's number for the engine that holds it."""
        self.seed = seed
        """What sampling uses where ``SamplingParams.seed`` is None."""
        self.ended: ShmschedError | None = None
        self._client = client
        self._position = 0
        self._rewinds: list[tuple[int, int]] = []
        self._fell_back = False

    @property
    def position(self) -> int:
        """How many tokens the session will hold once everything outstanding has run."""
        return self._position

    @property
    def vocab_size(self) -> int:
        return self.model.info.vocab_size

    @property
    def supports_rewind(self) -> bool:
        return self.model.supports_rewind

    def submit(
        self,
        tokens: Tokens,
        *,
        position: int | None = None,
        sampling: SamplingParams | None = GREEDY,
        output_rows: OutputRows = OutputRows.LAST,
        block: bool = True,
        block_timeout: float | None = None,
    ) -> StepFuture:
        """Append ``tokens`` to the session; the future resolves to the :class:`Response` of the last of them.

        tokens: any sequence of integers, or a 1-D array of any integer dtype. More than the model's
            ``max_prefill_chunk_size`` are split into chunks, of which only the last has output rows.
        position: where they start, if not at ``self.position``; below it, the session is rewound first.
        sampling: None for the raw distribution, ``response.logits``.
        output_rows: ALL must fit one chunk.
        block, block_timeout: whether and for how many seconds to wait for room.

        Raises InvalidRequest, Unsupported, Full, SessionClosed, SessionLost, SchedulerDied: nothing was submitted then.
        """
        return self._client._submit(self, tokens, position, sampling, output_rows, block, block_timeout)

    def close(self) -> None:
        """End the session. What is outstanding fails with SessionClosed. Idempotent."""
        self._client._close_session(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.ended else f"position {self._position}"
        return f"<Session {self.session_id} of {self.model.info.model!r}, {state}>"

    # --- what the client's channel tells it, under the client's lock ----------------------------------------------------

    def check_open(self) -> None:
        if self.ended is not None:
            raise type(self.ended)(str(self.ended))

    def submitted(self, request: int, start: int, end: int) -> None:
        """``request`` is the first number of a submission of positions ``start`` to ``end``."""
        if start < self._position or self._fell_back:
            self.rewound(request, start)
            self._fell_back = False
        self._position = end

    def rewound(self, request: int, position: int) -> None:
        """From number ``request`` on, the session goes on at ``position``."""
        self._rewinds = [(r, p) for r, p in self._rewinds if p < position][-63:]
        self._rewinds.append((request, position))
        self._position = min(self._position, position)

    def earliest_from(self, request: int, position: int) -> int:
        """The least of ``position`` and of where the submissions after ``request`` rewound to."""
        return min([position, *(p for r, p in self._rewinds if r > request)])

    def step_failed(self, request: int, position: int) -> None:
        """The step did not happen: the session stands where it started, unless it was rewound to there or below since."""
        if position < self._position and not any(r > request and p <= position for r, p in self._rewinds):
            self._position = position
            # What is submitted next knows of this failure, as if it rewound; what was submitted before does not.
            self._fell_back = True


def closed_error(session_id: int) -> SessionClosed:
    return SessionClosed(f"session {session_id} is closed; open another one")

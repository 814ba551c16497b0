"""What a client knows of a session: where it goes on, and what it was fed."""

from __future__ import annotations

from array import array
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shmsched.arguments import whole
from shmsched.dataplane.layouts import SAMPLING
from shmsched.errors import InvalidRequest, SessionClosed, ShmschedError, Unsupported
from shmsched.not_copied import of_a_connection
from shmsched.params import SamplingParams
from shmsched.saying import counted


class GenerationState(Protocol):
    """What a session reads of the generation that has it to itself."""

    @property
    def complete(self) -> bool: ...
    @property
    def position(self) -> int: ...
    @property
    def unfed(self) -> int | None: ...
    @property
    def held(self) -> str | None: ...


class SessionCore:
    """One sequence's state in one engine, as its client holds it. What changes is guarded by the client's lock."""

    __slots__ = (
        "_course", "_fed", "_fell_back", "_held", "_packed", "_position", "_rewinds", "_sampling", "_stream", "chunk_size", "ended",
        "engine", "model", "most_tokens", "options", "rewinds", "seed", "session_id", "supports_rewind", "unfed", "vocab_size",
    )  # fmt: skip
    __reduce__ = of_a_connection

    def __init__(self, session_id: int, model: Any, engine: int, seed: int, options: bytes = b"") -> None:
        """``model``: a ``shmsched.client.Model``."""
        self._stand_for(session_id, model, engine)
        self.seed = seed
        """What sampling uses where ``SamplingParams.seed`` is None."""
        self.options = options
        """What its engine was told at its opening."""
        self.ended: ShmschedError | None = None
        """Why it is over, if it is."""
        self._sampling: SamplingParams | None = None
        """How its last sampled step was, and the same packed."""
        self._packed = b""
        self.unfed: int | None = None
        """The token that a generation sampled last, which the session was not fed yet: the next generation begins with it."""
        self._held: str | None = None
        self._position = 0
        self._fed = array("i")
        self._stream: Any = None
        """A ``shmsched.client.TokenStream``, if it has one under way."""
        self._course: GenerationState | None = None
        """The generation that has the session to itself."""
        self._rewinds: list[tuple[int, int]] = []
        self._fell_back = False

    def _stand_for(self, session_id: int, model: Any, engine: int) -> None:
        self.session_id = session_id
        """The client's number for it: what a ``Request`` names."""
        self.model = model
        self.engine = engine
        """The daemon's number for the engine that holds it."""
        # The model's, which every step asks for.
        self.vocab_size = model.vocab_size
        self.chunk_size = model.max_prefill_chunk_size
        self.most_tokens = model.max_session_tokens
        self.supports_rewind = model.supports_rewind
        self.rewinds = model.rewinds
        """Where its engine can take it back to."""

    @property
    def position(self) -> int:
        """How many tokens the session will hold once everything outstanding has run."""
        return self._position

    @property
    def history(self) -> npt.NDArray[np.int32]:
        """The tokens up to ``position``, int32 (position,): a copy."""
        return np.array(self._fed[: self._position], np.int32)

    def __repr__(self) -> str:
        state = "closed" if self.ended else f"position {self._position}"
        return f"<{type(self).__name__} {self.session_id} of {self.model.info.model!r}, {state}>"

    # --- what the client and its channel tell it, under the client's lock -----------------------------------------------

    def check_open(self) -> None:
        """Raises why the session takes no submission."""
        if self.ended is not None:
            raise type(self.ended)(str(self.ended))
        stream = self._stream
        if stream is not None:
            if not (stream.done() or stream.withdrawn):
                raise InvalidRequest(
                    f"session {self.session_id} is generating; close that generation, or let it end, before the next submission"
                )
            self._stream = None

    def check_free(self, course: GenerationState | None) -> None:
        """Raises why the session takes no submission of ``course`` (None: of no generation)."""
        self.check_open()
        if course is not None and course is self._course:
            return
        self.settle()
        if self._course is not None:
            raise InvalidRequest(
                f"session {self.session_id} is generating; close that generation, or let it end, before the next submission"
            )
        if course is not None:
            raise InvalidRequest(f"this generation of session {self.session_id} has ended; call generate again")

    def begin(self, course: GenerationState, position: int, unfed: int | None) -> None:
        """A generation takes the session over, as it stood at the call of ``generate``."""
        if self.ended is None:
            # What is lost may be replayed: its first step finds out.
            self.check_free(None)
        if (position, unfed) != (self._position, self.unfed):
            raise InvalidRequest(
                f"session {self.session_id} has moved since generate was called: it goes on at {self._position}, and at"
                f" {position} then. Call generate again"
            )
        self._course = course

    def settle(self) -> None:
        """End a generation whose caller has all its tokens, and has not asked in vain for one more."""
        course = self._course
        if course is not None and course.complete:
            self.leave(course, course.position, course.unfed, course.held)

    def leave(self, course: GenerationState, position: int, unfed: int | None, held: str | None) -> None:
        """A generation ends, and leaves the session to go on at ``position``; another one's session is not its concern."""
        if self._course is course:
            self.rest(position, unfed, held)
            self._course = None

    def release(self, course: GenerationState) -> None:
        """A generation is over, whatever became of it."""
        if self._course is course:
            self._course = None

    def placed(self, position: int | None, n_tokens: int) -> int:
        """Where ``n_tokens`` start that are to go to ``position``, or go on where the session stands (None).

        Raises InvalidRequest or Unsupported where they cannot.
        """
        stands_at = start = self._position
        if position is not None:
            goes_on = f"(session {self.session_id} goes on at {stands_at}; below that it is rewound)"
            start = whole("position", position, 0, stands_at, where=goes_on)
            if start < stands_at and not self.rewinds.reach(start):
                raise Unsupported(
                    f"position {start} rewinds session {self.session_id} from {stands_at};"
                    f" model {self.model.name!r} {self.rewinds.in_words}"
                )
        if start + n_tokens > self.most_tokens:
            raise InvalidRequest(
                f"session {self.session_id} would hold {counted(start + n_tokens, 'token')}; {self.model.name} takes at most"
                f" {self.most_tokens}"
            )
        return start

    def packed(self, sampling: SamplingParams) -> bytes:
        """``sampling`` as it travels, with the session's own seed where it has none."""
        if self._sampling is not sampling:
            seed = self.seed if sampling.seed is None else sampling.seed
            self._packed = SAMPLING.pack(sampling.top_k, sampling.temperature, sampling.top_p, seed)
            self._sampling = sampling
        return self._packed

    def goes_on(self, request: int, start: int, tokens: bytes) -> None:
        """``tokens``, int32, are about to be submitted at ``start``; ``request`` is the number of their first step.

        Where nothing comes of it, the session goes on at ``start``. Else ``_position`` is its caller's to set, behind them.
        """
        if start < self._position or self._fell_back:
            self.rewound(request, start)
        if start < len(self._fed):
            del self._fed[start:]
        self._fed.frombytes(tokens)

    def submitted(self, request: int, start: int, tokens: bytes) -> None:
        """``tokens``, int32, were submitted at ``start``; ``request`` is the number of their first step."""
        self.goes_on(request, start, tokens)
        self._fell_back = False
        self._position = start + len(tokens) // 4
        self.unfed = None

    def was_fed(self, position: int, tokens: list[int]) -> None:
        """The scheduler has fed tokens that it had just given, from ``position`` on. Once more changes nothing."""
        history = self._fed
        del history[position:]
        history.extend(tokens)
        self._position = position + len(tokens)

    def rewound(self, request: int, position: int) -> None:
        """From number ``request`` on, the session goes on at ``position``."""
        rewinds = [(r, p) for r, p in self._rewinds if p < position]
        del rewinds[: max(0, len(rewinds) - 63)]
        rewinds.append((request, position))
        self._rewinds = rewinds
        self._position = min(self._position, position)

    def earliest_from(self, request: int, position: int) -> int:
        """The least of ``position`` and of where the submissions after ``request`` rewound to."""
        return min([position] + [p for r, p in self._rewinds if r > request])

    def step_failed(self, request: int, position: int) -> None:
        """The step did not happen: the session stands where it started, unless it was rewound to there or below since."""
        if position < self._position and not any(r > request and p <= position for r, p in self._rewinds):
            self._position = position
            # What is submitted next knows of this failure, as if it rewound; what was submitted before does not.
            self._fell_back = True

    def rest(self, position: int, unfed: int | None, held: str | None = None) -> None:
        """A generation leaves the session to go on at ``position``, if it stands there or can rewind to there."""
        if position < self._position and self.rewinds.reach(position):
            self._position = position
            # What is submitted next knows of it, as if it rewound.
            self._fell_back = True
        self.unfed, self._held = (unfed, held) if position == self._position else (None, None)

    def stands_at(self, length: int) -> tuple[int | None, str | None]:
        """What a fork of its first ``length`` tokens goes on with: ``unfed`` and ``held``, if that is all of it."""
        return (self.unfed, self.held) if length == self._position else (None, None)

    @property
    def held(self) -> str | None:
        """What was held back of the text up to ``unfed``, which goes on with what follows; None if nothing of it goes on. A character
        that is not complete is not in it: its tokens are."""
        return None if self.unfed is None else self._held

    def become(self, other: SessionCore) -> None:
        """Stand for ``other`` from now on: a new session, in whatever engine it is."""
        self._stand_for(other.session_id, other.model, other.engine)
        self.ended = other.ended
        self._position, self._rewinds, self._fell_back, self._stream, self._sampling = 0, [], False, None, None
        self._fed = array("i")
        self.unfed = None


def closed_error(session_id: int) -> SessionClosed:
    return SessionClosed(f"session {session_id} is closed; open another one")

"""What the daemon remembers of sessions and of the steps in them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from shmsched.dataplane.step import QueuedStep, StepState
from shmsched.errors import ErrorCode

if TYPE_CHECKING:
    from shmsched.daemon.client_link import ClientLink
    from shmsched.daemon.engine_link import EngineLink


QUEUED = StepState.QUEUED


class SessionState(Enum):
    WAITING = "waiting"
    """No engine has a free slot yet."""
    OPENING = "opening"
    """It has a slot; the engine has not confirmed it."""
    OPEN = "open"
    ENDED = "ended"


class Session:
    """One sequence's state in one engine. ``number`` is the daemon's; ``client_id`` is the client's own and only echoed."""

    __slots__ = (
        "client", "client_id", "cut_off", "engine", "model", "next_position", "number", "options", "outstanding", "patient", "slot",
        "state",
    )  # fmt: skip

    def __init__(self, number: int, client: ClientLink, client_id: int, model: str, options: bytes) -> None:
        self.number = number
        self.client = client
        self.client_id = client_id
        self.model = model
        self.options = options
        self.state = SessionState.WAITING
        self.patient = False
        """While it waits for a slot, it does so until its client gives up, even where no engine is left."""
        self.engine: EngineLink | None = None
        self.slot = -1
        self.next_position = 0
        """The end of its last step that counts: where the next one starts, or below it, to rewind."""
        self.cut_off: tuple[ErrorCode, str] | None = None
        """Why its last step that failed or was rejected did: what was submitted behind that one before its client knew fails of the
        same."""
        self.outstanding: dict[int, Step] = {}
        """Its queued and in-flight steps by number, which is their order of submission."""

    @property
    def held(self) -> int:
        """How many of its tokens its engine has taken for good: what is outstanding may change those behind them."""
        return min((step.position for step in self.outstanding.values()), default=self.next_position)

    @property
    def generating(self) -> Step | None:
        """The outstanding step of its generation. Nothing can be submitted behind it: nobody knows where it will end."""
        last = self.outstanding[next(reversed(self.outstanding))] if self.outstanding else None
        return last if last is not None and last.generation is not None else None


class Generation:
    """Decodes that the scheduler queues by itself, each with the token that the one before it gave."""

    __slots__ = ("further", "stop_tokens")

    def __init__(self, further: int, stop_tokens: frozenset[int]) -> None:
        self.further = further
        """How many may still follow."""
        self.stop_tokens = stop_tokens


class Wanted(NamedTuple):
    """What is wanted of a step. Steps that want the same share it: nearly all of a client's."""

    entry: bytes
    """As ``batch_slot.WANTED`` packs it: the engine's business."""
    n_rows: int
    n_results: int
    """How many sampled tokens answer it; none where the client wants the logits themselves."""
    sampled: bool
    plain: bool
    """One sampled token answers it, and nothing follows by itself."""
    deadline: float
    """When it must have been dispatched, by the daemon's clock, or 0."""
    generation: Generation | None
    """What follows its answer, if anything may."""
    more: bool = False
    """It is a part of a submission, and not the last: nobody waits for it."""


class Step(QueuedStep):
    """A step as the daemon holds it: copied out of the client's memory and validated."""

    __slots__ = (
        "entered", "position", "request", "tokens", "wanted",
    )  # fmt: skip

    session: Session

    def __init__(
        self,
        number: int,
        session: Session,
        n_tokens: int,
        request: int,
        tokens: bytes,
        position: int,
        wanted: Wanted,
        entered: float,
    ) -> None:
        # As QueuedStep.__init__ does, which takes 0.14 us more; rank and lane are written as it is queued.
        self.number = number
        self.session = session
        self.n_tokens = n_tokens
        self.request = request
        """The client's number for it, only echoed."""
        self.tokens = tokens
        """int32, little-endian."""
        self.position = position
        self.wanted = wanted
        self.entered = entered
        """When it was queued, by the daemon's clock."""
        self.state = QUEUED

    @property
    def deadline(self) -> float:
        return self.wanted.deadline

    @property
    def generation(self) -> Generation | None:
        return self.wanted.generation

    @property
    def raw_rows(self) -> int:
        """How many rows of the client's arena it holds."""
        return self.wanted.n_rows - self.wanted.n_results

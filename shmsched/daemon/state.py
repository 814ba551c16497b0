"""What the daemon remembers of sessions and of the steps in them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from shmsched.scheduling import QueuedStep, StepState

if TYPE_CHECKING:
    from shmsched.daemon.client_link import ClientLink
    from shmsched.daemon.engine_link import EngineLink


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
        "client", "client_id", "engine", "model", "next_position", "number", "options", "outstanding", "slot", "state",
    )  # fmt: skip

    def __init__(self, number: int, client: ClientLink, client_id: int, model: str, options: bytes) -> None:
        self.number = number
        self.client = client
        self.client_id = client_id
        self.model = model
        self.options = options
        self.state = SessionState.WAITING
        self.engine: EngineLink | None = None
        self.slot = -1
        self.next_position = 0
        """The end of its last step that counts: where the next one starts, or below it, to rewind."""
        self.outstanding: dict[int, Step] = {}
        """Its queued and in-flight steps by number, which is their order of submission."""


class Step(QueuedStep):
    """A step as the daemon holds it: copied out of the client's memory and validated."""

    __slots__ = (
        "n_rows", "output_rows", "position", "request", "rows_offset", "sampled", "sampling", "state", "tokens",
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
        output_rows: int,
        n_rows: int,
        sampled: bool,
        sampling: tuple[int, float, float, int],
        rows_offset: int,
    ) -> None:
        super().__init__(number, session, n_tokens)
        self.request = request
        """The client's number for it, only echoed."""
        self.tokens = tokens
        """int32, little-endian."""
        self.position = position
        self.output_rows = output_rows
        self.n_rows = n_rows
        self.sampled = sampled
        self.sampling = sampling
        """top_k, temperature, top_p, seed."""
        self.rows_offset = rows_offset
        """Where its raw logits go in the client's arena, in bytes."""
        self.state = StepState.QUEUED

    @property
    def raw_rows(self) -> int:
        """How many rows of the client's arena it holds."""
        return 0 if self.sampled else self.n_rows

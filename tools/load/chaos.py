"""Which faults a stress run injects, how often, and which errors each of them explains."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

LEAST_EVERY_S = 0.05
MOST_EVERY_S = 86400.0


class Fault(StrEnum):
    """A kind of fault."""

    KILL_ENGINE = "kill-engine"
    """SIGKILL for an engine that is ready."""
    STOP_ENGINE = "stop-engine"
    """SIGSTOP for an engine, for longer than the daemon's step time-out."""
    KILL_CLIENT = "kill-client"
    """SIGKILL for a client process; another one takes its place."""
    STOP_CLIENT = "stop-client"
    """SIGSTOP for a client process, and SIGCONT some seconds later."""
    GARBAGE = "garbage"
    """A hostile peer's attack on the socket."""
    CANCEL = "cancel"
    """Not a fault of a process, but the share of submissions that are cancelled."""


EXPLAINS: dict[Fault, frozenset[str]] = {
    Fault.KILL_ENGINE: frozenset({"EngineDied", "SessionLost"}),
    Fault.STOP_ENGINE: frozenset({"EngineTimeout", "SessionLost"}),
    Fault.STOP_CLIENT: frozenset({"SchedulerDied"}),
}
"""The errors in which steps may end because of a fault, where it hit the very process that the error blames."""


@dataclass(frozen=True, slots=True)
class Chaos:
    """What to inject."""

    every_s: dict[Fault, float] = field(default_factory=dict)
    """Mean seconds between two faults of the kind."""
    cancel: float | None = None
    """The share of submissions that are cancelled; None for the clients' own habit."""

    @property
    def hits_processes(self) -> bool:
        """Whether steps may fail of it."""
        return any(fault in EXPLAINS for fault in self.every_s)


def parse_chaos(text: str) -> Chaos:
    """Read ``name=value`` pairs with commas in between. Raises ValueError that names what is known."""
    every: dict[Fault, float] = {}
    cancel: float | None = None
    for item in text.split(","):
        name, _, number = item.strip().partition("=")
        try:
            fault = Fault(name)
        except ValueError:
            raise ValueError(f"{name!r} is no fault; known are {', '.join(Fault)}") from None
        if fault in every or (fault is Fault.CANCEL and cancel is not None):
            raise ValueError(f"{name} is there twice")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if fault is Fault.CANCEL:
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"cancel={number} is not a share of the submissions; from 0 to 1 is wanted")
            cancel = value
        elif not LEAST_EVERY_S <= value <= MOST_EVERY_S:
            raise ValueError(
                f"{name}={number} is not a mean interval; from {LEAST_EVERY_S:g} to {MOST_EVERY_S:g} seconds is wanted"
            )
        else:
            every[fault] = value
    return Chaos(every, cancel)

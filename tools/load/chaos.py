"""Which faults a stress run injects, how often, and which errors each of them explains."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

LEAST_EVERY_S, MOST_EVERY_S = 0.05, 86400.0


class Fault(StrEnum):
    """A kind of fault."""

    KILL_ENGINE = "kill-engine"
    STOP_ENGINE = "stop-engine"  # for longer than the daemon's step time-out
    KILL_CLIENT = "kill-client"  # another one takes its place
    STOP_CLIENT = "stop-client"
    GARBAGE = "garbage"  # a hostile peer's attack on the socket
    INTERRUPT = "interrupt"  # a signal whose handler raises, at any moment of any call of one client, which goes on
    PAUSE = "pause"  # daemon, engines and clients are stopped at once, and go on one after the other
    SHORT_DESCRIPTORS = "short-descriptors"  # of daemon, engine or client, as the next one
    SHORT_MEMORY = "short-memory"  # address space
    SHORT_PIDS = "short-pids"  # daemon and engines can start no process and no thread
    FULL_SHM = "full-shm"
    CANCEL = "cancel"  # not a fault of a process, but the share of submissions that are cancelled
    PID_NAMESPACE = "pid-namespace"  # the share of clients that have a PID namespace of their own


SHARES = {Fault.CANCEL: "submissions", Fault.PID_NAMESPACE: "clients"}
SHORTAGES = (Fault.SHORT_DESCRIPTORS, Fault.SHORT_MEMORY, Fault.SHORT_PIDS, Fault.FULL_SHM)

EXPLAINS: dict[Fault, frozenset[str]] = {
    Fault.KILL_ENGINE: frozenset({"EngineDied", "SessionLost"}),
    Fault.STOP_ENGINE: frozenset({"EngineTimeout", "SessionLost"}),
    Fault.STOP_CLIENT: frozenset({"SchedulerDied"}),
    **{shortage: frozenset({"SharedMemoryError", "SharedMemoryLimit", "SystemLimit"}) for shortage in SHORTAGES},
}
"""The errors in which steps may end because of a fault, where it hit the very process that the error blames, or where there was a
shortage at that time of the very thing."""


@dataclass(frozen=True, slots=True)
class Chaos:
    """What to inject: mean seconds between two faults of a kind, and shares. Empty: nothing."""

    every_s: dict[Fault, float] = field(default_factory=dict)
    shares: dict[Fault, float] = field(default_factory=dict)

    @property
    def asked_for(self) -> list[Fault]:
        return [*self.every_s, *self.shares]

    def __bool__(self) -> bool:
        return bool(self.asked_for)

    @property
    def hits_processes(self) -> bool:
        """Whether steps may fail of it."""
        return any(fault in EXPLAINS for fault in self.every_s)


def parse_chaos(text: str) -> Chaos:
    """Read ``name=value`` pairs with commas in between. Raises ValueError that names what is known."""
    chaos = Chaos()
    for item in text.split(","):
        name, _, number = item.strip().partition("=")
        if name not in tuple(Fault):
            raise ValueError(f"{name!r} is no fault; known are {', '.join(Fault)}")
        fault = Fault(name)
        if fault in chaos.every_s or fault in chaos.shares:
            raise ValueError(f"{name} is there twice")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if fault in SHARES:
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}={number} is not a share of the {SHARES[fault]}; from 0 to 1 is wanted")
            chaos.shares[fault] = value
        else:
            if not LEAST_EVERY_S <= value <= MOST_EVERY_S:
                raise ValueError(
                    f"{name}={number} is not a mean interval; from {LEAST_EVERY_S:g} to {MOST_EVERY_S:g} seconds is wanted"
                )
            chaos.every_s[fault] = value
    return chaos

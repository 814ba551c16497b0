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
    INTERRUPT = "interrupt"
    """A signal whose handler raises, at any moment of any call of one client, which goes on."""
    PAUSE = "pause"
    """SIGSTOP for daemon, engines and clients at once, and SIGCONT for one after the other, in any order."""
    SHORT_DESCRIPTORS = "short-descriptors"
    """For a second or two daemon, engine or client may open no descriptor more."""
    SHORT_MEMORY = "short-memory"
    """For a second or two the address space of daemon, engine or client may grow by little."""
    SHORT_PIDS = "short-pids"
    """For a second or two daemon and engines can start no process and no thread."""
    FULL_SHM = "full-shm"
    """For a second or two /dev/shm has next to no room."""
    CANCEL = "cancel"
    """Not a fault of a process, but the share of submissions that are cancelled."""
    PID_NAMESPACE = "pid-namespace"
    """Not one that comes again and again, but the share of clients that have a PID namespace of their own."""


SHARES = (Fault.CANCEL, Fault.PID_NAMESPACE)
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
    """What to inject."""

    every_s: dict[Fault, float] = field(default_factory=dict)
    """Mean seconds between two faults of the kind."""
    shares: dict[Fault, float] = field(default_factory=dict)
    """Of submissions that are cancelled (if not there, it is the clients' own habit), of clients in a namespace of their own."""

    @property
    def hits_processes(self) -> bool:
        """Whether steps may fail of it."""
        return any(fault in EXPLAINS for fault in self.every_s)


def parse_chaos(text: str) -> Chaos:
    """Read ``name=value`` pairs with commas in between. Raises ValueError that names what is known."""
    every: dict[Fault, float] = {}
    shares: dict[Fault, float] = {}
    for item in text.split(","):
        name, _, number = item.strip().partition("=")
        try:
            fault = Fault(name)
        except ValueError:
            raise ValueError(f"{name!r} is no fault; known are {', '.join(Fault)}") from None
        if fault in every or fault in shares:
            raise ValueError(f"{name} is there twice")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if fault in SHARES:
            if not 0.0 <= value <= 1.0:
                of = "submissions" if fault is Fault.CANCEL else "clients"
                raise ValueError(f"{name}={number} is not a share of the {of}; from 0 to 1 is wanted")
            shares[fault] = value
        elif not LEAST_EVERY_S <= value <= MOST_EVERY_S:
            raise ValueError(
                f"{name}={number} is not a mean interval; from {LEAST_EVERY_S:g} to {MOST_EVERY_S:g} seconds is wanted"
            )
        else:
            every[fault] = value
    return Chaos(every, shares)

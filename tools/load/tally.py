"""What a process of a run counts, in bounded memory. It is sent as it stands, and adds up over processes."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from shmsched import EngineDied, EngineTimeout, SchedulerDied, SessionLost, SharedMemoryError, SystemLimit
from shmsched.tools.load.chaos import Fault

KEPT_EXAMPLES = 5
SELF = "self"
_PER_OCTAVE = 64
_SHORT_OF = {
    Fault.SHORT_DESCRIPTORS: r"ulimit -n|[Dd]escriptor|Too many open files",
    Fault.FULL_SHM: r"/dev/shm|No space left",
    Fault.SHORT_MEMORY: r"ulimit -v|address space|Cannot allocate memory",
    Fault.SHORT_PIDS: r"pids\.max|ulimit -u|new thread|Resource temporarily unavailable",
}
"""What an error says that blames a shortage."""


def blame(error: BaseException) -> str | None:
    """What an error says it comes of: a process, by its number, or SELF for a connection of this one that was lost; or a shortage,
    with the second of ``time.monotonic()`` at which it was met."""
    if isinstance(error, SchedulerDied):
        return SELF
    if isinstance(error, EngineDied | EngineTimeout | SessionLost):
        named = re.search(r"\(pid (\d+)\)", str(error))
        return named[1] if named else None
    if isinstance(error, SharedMemoryError | SystemLimit):
        fault = next((f for f, pattern in _SHORT_OF.items() if re.search(pattern, str(error))), None)
        return None if fault is None else f"{fault}@{int(time.monotonic())}"
    return None


class Latencies(Counter[int]):
    """Microseconds, in buckets about 1 % wide."""

    def note(self, us: float) -> None:
        self[int(math.log2(us) * _PER_OCTAVE) if us > 1.0 else 0] += 1

    def percentile(self, q: float) -> float:
        """The middle of the bucket that holds it; 0 if nothing was counted."""
        left = math.ceil(self.total() * q / 100.0)
        for bucket in sorted(self):
            left -= self[bucket]
            if left <= 0:
                return float(2.0 ** ((bucket + 0.5) / _PER_OCTAVE))
        return 0.0


class Wait(NamedTuple):
    """One of the quiet neighbour's that took long: when it began, and how much of it a thread that only sleeps overslept."""

    at: float
    waited: float
    machine: float


@dataclass(slots=True)
class Tally:
    """Counts of steps unless the name says otherwise."""

    sent: int = 0
    completed: int = 0
    tokens: int = 0
    cancelled: int = 0
    closed: int = 0  # outstanding when their session was closed as asked
    expired: int = 0  # whose deadline passed
    failed: int = 0  # in a way that nothing here had asked for
    lost: int = 0  # not settled by the deadline
    unseen: int = (
        0  # the most that the scheduler may have queued by itself, and dropped, without a client having seen it
    )
    wrong: int = 0  # answers, positions and held rows
    full: int = 0  # calls that were made again later
    cancels: int = 0  # calls of cancel()
    cancels_late: int = 0
    rewinds: int = 0
    sessions_opened: int = 0
    sessions_closed: int = 0
    pipelined: int = 0  # submissions made while an earlier one of their session was outstanding
    rows_checked: int = 0
    patterns_checked: int = 0  # raw rows that were compared at every index
    leases_held: int = 0  # for a while, and compared again at the end of it
    drafts_accepted: int = 0  # tokens
    connects: int = 0
    generations: int = 0
    stops: int = 0  # generations that a stop token ended
    forks: int = 0
    late: int = 0  # waits of the quiet neighbour beyond its bound
    longest_wait: float = 0.0  # the quiet neighbour's, in seconds
    longest_us: float = 0.0
    latencies: Latencies = field(default_factory=Latencies)
    errors: Counter[str] = field(default_factory=Counter)  # by kind, how often
    blamed: Counter[str] = field(default_factory=Counter)  # steps by error and what that blames: "EngineDied 1234"
    interrupts: Counter[str] = field(default_factory=Counter)  # by the call in which they came
    attacks: Counter[str] = field(default_factory=Counter)  # by what the daemon did about the hostile peer's
    examples: list[str] = field(default_factory=list)  # the first few of what went wrong, in words
    late_waits: list[Wait] = field(default_factory=list)

    def say_wrong(self, what: str) -> None:
        self.wrong += 1
        self._example(f"wrong: {what}")

    def say_failed(self, error: BaseException, steps: int, where: str, *, peers_fall: bool) -> None:
        """Steps ended as nothing here had asked for. What blames a process or a shortage is the parent's to judge, if there may be
        any."""
        kind = type(error).__name__
        blamed = blame(error) if peers_fall else None
        if blamed is not None:
            self.blamed[f"{kind} {blamed}"] += steps
            return
        self.failed += steps
        self.errors[kind] += 1
        self._example(f"failed: {where}: {kind}: {error}")

    def say_lost(self, steps: int, what: str) -> None:
        self.lost += steps
        self.examples.insert(0, f"lost: {what}")

    def took(self, seconds: float) -> None:
        """From a submission to its answer."""
        self.latencies.note(seconds * 1e6)
        self.longest_us = max(self.longest_us, seconds * 1e6)

    def _example(self, text: str) -> None:
        if len(self.examples) < KEPT_EXAMPLES:
            self.examples.append(text)

    def merge(self, other: Tally) -> None:
        """Counts add up, and of other numbers the greatest stays. The other one's thread may go on counting meanwhile."""
        for name in (f.name for f in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            match mine:
                case int():
                    setattr(self, name, mine + theirs)
                case float():
                    setattr(self, name, max(mine, theirs))
                case Counter():
                    mine.update(theirs.copy())
                case list():
                    mine += theirs[: max(0, KEPT_EXAMPLES - len(mine))]

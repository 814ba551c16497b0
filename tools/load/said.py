"""The lines that daemon, engines and clients may print, and which fault each of them comes of. What is not in here is a fault.

The tests of processes hold what they hear to the same list.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shmsched.tools.load.chaos import SHORTAGES, Fault


@dataclass(frozen=True, slots=True)
class Known:
    """A line that a fault may cause. ``faults`` empty: nothing that is injected causes it, so a run has none of it."""

    pattern: re.Pattern[str]
    faults: frozenset[Fault]
    each: int = 1
    """So many lines may come of each fault."""


def _known(pattern: str, *faults: Fault, each: int = 1) -> Known:
    return Known(re.compile(pattern), frozenset(faults), each)


_ENGINE = r"shmsched: engine .+? \((?:pid \d+|in another PID namespace)\) "
KNOWN = (
    _known(_ENGINE + r"has been silent for .* it has not .* it is killed$", Fault.STOP_ENGINE),
    _known(_ENGINE + r"has not .* within \S+ s; it is killed; ", Fault.STOP_ENGINE),
    _known(_ENGINE + r"ended( while it ran batch \d+)?: ", Fault.KILL_ENGINE),
    _known(_ENGINE + r"is attached, for model "),
    _known(_ENGINE + r"did not start within \S+ s; it is killed$"),
    _known(_ENGINE + r"is marked down: "),
    _known(_ENGINE + r"ended; a child of its keeps its connection open$"),
    # Whether it is started again, the run's verdict says.
    _known(r"shmsched: engine .+? did not start: ", *SHORTAGES, each=8),
    _known(r"shmsched: engine .+? cannot be started for now, and is tried again in ", *SHORTAGES, each=20),
    _known(r"shmsched: engine .+?: it died \d+ times "),
    _known(r"shmsched: the engine with pid \d+ did not start: "),
    _known(r"shmsched: client (?:pid \d+|in another PID namespace) is disconnected after \S+ s behind: ", Fault.STOP_CLIENT),
    _known(r"shmsched: cannot accept connections for now: ", Fault.SHORT_DESCRIPTORS, each=20),
    # An engine that is started while it can have no threads: numpy does without.
    _known(r"OpenBLAS blas_thread_init: ", Fault.SHORT_PIDS, Fault.SHORT_MEMORY, each=40),
    _known(r"shmsched: (?:compiled|interpreted), pid \d+, on "),
    _known(r"shmsched: stopping; open sessions \(\d+\) may go on for "),
    _known(r"dequantizing "),
    _known(r"shmsched engine .+? \(pid \d+\): "),
)  # fmt: skip


def known(line: str) -> Known | None:
    """What may cause the line; None where nobody knows it."""
    return next((entry for entry in KNOWN if entry.pattern.match(line)), None)


def unknown(lines: Iterable[str]) -> list[str]:
    """Those that nobody knows, a traceback's above all."""
    return [line for line in lines if line.strip() and known(line) is None]


def unexplained(said: Mapping[Known, int], injected: Mapping[Fault, int]) -> list[str]:
    """In words: known lines of which there are more than the faults that were injected may cause."""
    problems = []
    for entry, n in said.items():
        most = sum(injected.get(fault, 0) for fault in entry.faults) * entry.each
        if n > most:
            of = f"{' and '.join(sorted(entry.faults))} may cause {most}" if entry.faults else "no fault causes it"
            problems.append(f"{n} lines like {entry.pattern.pattern!r} were printed; {of}")
    return problems


class Said:
    """Lines that were printed, in bounded memory."""

    MOST_KEPT = 60

    def __init__(self) -> None:
        self.known: Counter[Known] = Counter()
        self.unknown = 0
        self.kept: Counter[str] = Counter()
        """Those that nobody knows, each with who said it, and how often: the first few that differ."""

    def hear(self, who: str, line: str) -> None:
        entry = known(line)
        if entry is not None:
            self.known[entry] += 1
        elif line.strip():
            self.unknown += 1
            said = f"{who} printed: {line}"
            if said in self.kept or len(self.kept) < self.MOST_KEPT:
                self.kept[said] += 1

    def problems(self, injected: Mapping[Fault, int]) -> list[str]:
        """What was printed and must not be, in words."""
        said = unexplained(self.known, injected)
        kept = [line if n == 1 else f"{line}  (x {n:,})" for line, n in self.kept.items()]
        more = self.unknown - self.kept.total()
        return [*said, *kept, *([f"and {more:,} more lines that nobody knows"] if more else [])]

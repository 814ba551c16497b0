"""The lines that daemon, engines and clients may print, and which fault each of them comes of. What is not in here is a fault.

The tests of processes hold what they hear to the same list.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from shmsched.saying import say
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
        said = [line if n == 1 else f"{line}  (x {n:,})" for line, n in self.kept.items()]
        if more := self.unknown - self.kept.total():
            said.append(f"and {more:,} more lines that nobody knows")
        for entry, n in self.known.items():
            most = sum(injected.get(fault, 0) for fault in entry.faults) * entry.each
            if n > most:
                of = f"{' and '.join(sorted(entry.faults))} may cause {most}" if entry.faults else "no fault causes it"
                said.insert(0, f"{n} lines like {entry.pattern.pattern!r} were printed; {of}")
        return said


class Ear:
    """Hears what processes print as long as any may print. Its threads never let a pipe fill up: a daemon that cannot print
    would wait."""

    def __init__(self) -> None:
        self._said = Said()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @contextmanager
    def pipe(self, who: str) -> Iterator[int]:
        """A descriptor for a process to print to; it must have a copy of it by the end of the block."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        thread = threading.Thread(target=self._listen, args=(who, reading), daemon=True)
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        thread.start()
        try:
            yield writing
        finally:
            os.close(writing)

    def close(self, seconds: float) -> Said:
        """Hear them out, as far as they end within ``seconds``."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return self._said

    def _listen(self, who: str, reading: int) -> None:
        with open(reading, errors="replace", newline="\n") as lines:
            for line in (whole.rstrip("\n") for whole in lines):
                with self._lock:
                    self._said.hear(who, line)
                # As if nobody had listened: whoever watches the run reads it as it comes.
                say(line, sys.__stderr__)

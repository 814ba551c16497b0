"""What a process holds over time, from /proc, and whether that is flat."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

SAMPLE_S = 0.1
MOST_SAMPLES = 600
LEAST_SAMPLES = 24
"""Of which a third is dropped as warm-up; with fewer nothing is said."""
MIB = 1 << 20


@dataclass(slots=True)
class Series:
    """One quantity over time, and how much it may grow."""

    unit: str
    bound: float
    """How much it may grow."""
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, now: float, value: float) -> None:
        self.times.append(now)
        self.values.append(value)

    def thin(self) -> None:
        """Keep every other sample."""
        del self.times[1::2], self.values[1::2]

    @property
    def peak(self) -> float:
        return max(self.values)

    @property
    def growth(self) -> float | None:
        """From the middle third to the last, by their means or by the least in them, whichever grows less: what comes and goes with
        clients may move either, what is leaked is held at every moment. The first third is warm-up. None: too few samples."""
        n = len(self.values)
        if n < LEAST_SAMPLES:
            return None
        middle, last = self.values[n // 3 : 2 * n // 3], self.values[2 * n // 3 :]
        return min(float(np.mean(last) - np.mean(middle)), min(last) - min(middle))

    @property
    def slope(self) -> float | None:
        """Per minute, fitted to what follows the first third."""
        n = len(self.values)
        if n < LEAST_SAMPLES:
            return None
        times, values = np.array(self.times[n // 3 :]), np.array(self.values[n // 3 :])
        return float(np.polyfit(times - times[0], values, 1)[0] * 60.0)

    @property
    def is_flat(self) -> bool | None:
        growth = self.growth
        return None if growth is None else growth <= self.bound


MEMORY = "memory"
DESCRIPTORS = "descriptors"
SHARED_MEMORY = "shared memory"


@dataclass(slots=True)
class Held:
    """What one process holds: memory of its own (resident, not shared with others), descriptors, and segments of ours."""

    name: str
    pid: int
    series: dict[str, Series] = field(
        default_factory=lambda: {
            MEMORY: Series("MiB", 2.0),
            DESCRIPTORS: Series("", 4.0),
            SHARED_MEMORY: Series("MiB", 8.0),
        }
    )

    def sample(self, now: float) -> None:
        """Does nothing once the process is gone."""
        try:
            memory = _own_memory(self.pid)
            descriptors = len(os.listdir(f"/proc/{self.pid}/fd"))
            shared = _segments(self.pid)
        except OSError:
            return
        self.series[MEMORY].add(now, memory / MIB)
        self.series[DESCRIPTORS].add(now, descriptors)
        self.series[SHARED_MEMORY].add(now, shared / MIB)


@dataclass(slots=True)
class Watch:
    """Samples some processes at even intervals, which grow with the time that it has watched."""

    processes: list[Held]
    every_s: float = SAMPLE_S
    _next: float = 0.0
    _taken: int = 0

    @property
    def can_tell(self) -> bool:
        """Whether it has watched for long enough to tell what grows. A fast machine reaches a short soak's goals before that."""
        return not self.processes or self._taken >= 2 * LEAST_SAMPLES

    def tick(self, now: float) -> None:
        if not self.processes or now < self._next:
            return
        self._next = now + self.every_s
        for held in self.processes:
            held.sample(now)
        self._taken += 1
        if self._taken == MOST_SAMPLES:
            self._taken //= 2
            self.every_s *= 2
            for series in (series for held in self.processes for series in held.series.values()):
                series.thin()


def _own_memory(pid: int) -> int:
    """Bytes of RssAnon: what the process has allocated. A client's segment counts where it is shared."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    # A process that has ended and was not waited for has none.
    raise ProcessLookupError(pid)


def _segments(pid: int) -> int:
    """Bytes of the segments of ours that it maps."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/shmsched-" in line:
            begin, _, end = line.split(maxsplit=1)[0].partition("-")
            total += int(end, 16) - int(begin, 16)
    return total

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
MEMORY, DESCRIPTORS, SHARED_MEMORY = "memory", "descriptors", "shared memory"
BOUNDS = {MEMORY: (2.0, "MiB"), DESCRIPTORS: (4.0, ""), SHARED_MEMORY: (8.0, "MiB")}
"""How much each may grow."""


@dataclass(slots=True)
class Series:
    """One quantity of one process over time."""

    process: str
    quantity: str
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def bound(self) -> float:
        return BOUNDS[self.quantity][0]

    @property
    def unit(self) -> str:
        return BOUNDS[self.quantity][1]

    def add(self, now: float, value: float) -> None:
        self.times.append(now)
        self.values.append(value)

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
        times = np.array(self.times[n // 3 :])
        return float(np.polyfit(times - times[0], self.values[n // 3 :], 1)[0] * 60.0)

    @property
    def is_flat(self) -> bool | None:
        growth = self.growth
        return None if growth is None else growth <= self.bound


class Watch:
    """Samples some processes at even intervals, which grow with the time that it has watched."""

    def __init__(self, processes: dict[str, int]) -> None:
        self._pids = processes
        self.series = [Series(name, quantity) for name in processes for quantity in BOUNDS]
        self.every_s = SAMPLE_S
        self._next = 0.0
        self._taken = 0

    @property
    def can_tell(self) -> bool:
        """Whether it has watched for long enough to tell what grows. A fast machine reaches a short soak's goals before that."""
        return not self._pids or self._taken >= 2 * LEAST_SAMPLES

    def tick(self, now: float) -> None:
        if now < self._next:
            return
        self._next = now + self.every_s
        for name, pid in self._pids.items():
            try:
                held = held_by(pid)
            except OSError:
                # It is gone.
                continue
            for series in self.series:
                if series.process == name:
                    series.add(now, held[series.quantity])
        self._taken += 1
        if self._taken == MOST_SAMPLES:
            self._taken //= 2
            self.every_s *= 2
            for series in self.series:
                del series.times[1::2], series.values[1::2]


def held_by(pid: int) -> dict[str, float]:
    """Memory of its own (resident, not shared with others), descriptors, and segments of ours that it maps."""
    proc = Path(f"/proc/{pid}")
    memory = [line.split()[1] for line in (proc / "status").read_text().splitlines() if line.startswith("RssAnon:")]
    if not memory:
        # It has ended, and was not waited for.
        raise ProcessLookupError(pid)
    ours = [line.split()[0] for line in (proc / "maps").read_text().splitlines() if "/shmsched-" in line]
    bounds = ([int(address, 16) for address in mapping.split("-")] for mapping in ours)
    return {
        MEMORY: int(memory[0]) / 1024,
        DESCRIPTORS: len(os.listdir(proc / "fd")),
        SHARED_MEMORY: sum(end - begin for begin, end in bounds) / MIB,
    }

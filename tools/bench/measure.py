"""Alternating runs, and what is concluded from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effort:
    """How often and how long to measure. The warm-up before each round is not counted."""

    rounds: int
    seconds: float
    warm_up: float
    show: Callable[[str], None] = lambda _: None
    """Told what is being measured."""
    beside: str | None = None
    """Another environment's Python, whose shmsched is the only other contestant."""


FULL, QUICK = Effort(7, 1.5, 0.3), Effort(3, 0.5, 0.2)


@dataclass(frozen=True, slots=True)
class Bar:
    """What must come out."""

    limit: float
    at_least: bool = True

    def times(self, value: float) -> float:
        """1 is the bar itself; more is better, whichever way the bar points."""
        return value / self.limit if self.at_least else self.limit / max(value, 1e-9)


@dataclass(frozen=True, slots=True)
class Figure:
    """What came out of each round, and its bar if there is one. The unit of ratios is x."""

    what: str
    unit: str
    values: list[float]
    bar: Bar | None = None

    @property
    def spread(self) -> tuple[float, float, float]:
        """The median, the least and the greatest."""
        return median(self.values), min(self.values), max(self.values)

    @property
    def times_bar(self) -> float:
        """The median, as a multiple of its bar; of none, nothing."""
        return self.bar.times(self.spread[0]) if self.bar else 0.0

    @property
    def met(self) -> bool:
        return self.times_bar >= 1.0


@dataclass(slots=True)
class Finding:
    """What a scenario found."""

    figures: list[Figure]
    notes: list[str] = field(default_factory=list)


def alternate(runs: Mapping[str, Callable[[], T]], effort: Effort) -> dict[str, list[T]]:
    """A B C A B C ...: each of ``runs`` once in every round, so that what else the machine does meets all of them alike."""
    results: dict[str, list[T]] = {name: [] for name in runs}
    for number in range(effort.rounds):
        for name, run in runs.items():
            effort.show(f"{name}, round {number + 1} of {effort.rounds}")
            results[name].append(run())
    return results


def figures(values: Mapping[str, list[float]], unit: str) -> list[Figure]:
    """Of runs, with no bar."""
    return [Figure(name, unit, got) for name, got in values.items()]


def ratio(values: Mapping[str, list[float]], of: str, to: str, bar: Bar) -> Figure:
    """Of each round's pair."""
    return Figure(f"{of} / {to}", "x", [a / b for a, b in zip(values[of], values[to], strict=True)], bar)

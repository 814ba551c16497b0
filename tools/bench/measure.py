"""Alternating runs, and what is concluded from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

Show = Callable[[str], None]
"""Told what is being measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long and how often to measure."""

    rounds: int
    seconds: float
    """Of one round."""
    warm_up: float
    """Before each round, not counted."""
    show: Show = lambda _: None


FULL_ROUNDS, QUICK_ROUNDS = 7, 3


def full(show: Show) -> Effort:
    """What bars are judged by."""
    return Effort(rounds=FULL_ROUNDS, seconds=1.5, warm_up=0.3, show=show)


def quick(show: Show) -> Effort:
    """To see that it runs, and roughly where things stand."""
    return Effort(rounds=QUICK_ROUNDS, seconds=0.5, warm_up=0.2, show=show)


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several runs, the least and the greatest."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One contestant's runs."""

    name: str
    unit: str
    values: list[float]

    @property
    def spread(self) -> Spread:
        return Spread.of(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What must come out."""

    limit: float
    at_least: bool = True

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A figure and its bar. ``values`` has one for each round, or the worst of all where no round may miss it."""

    what: str
    unit: str
    """``x`` for ratios."""
    values: list[float]
    bar: Bar

    @property
    def spread(self) -> Spread:
        return Spread.of(self.values)

    @property
    def met(self) -> bool:
        """By the median."""
        return self.bar.met(self.spread.median)


@dataclass(slots=True, kw_only=True)
class Finding:
    """What a scenario found."""

    scenario: str
    series: list[Series] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def alternate(runs: Mapping[str, Callable[[], float]], effort: Effort) -> dict[str, list[float]]:
    """A B C A B C ...: each of ``runs`` once in every round, so that what else the machine does meets all of them alike."""
    values: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(effort.rounds):
        for name, run in runs.items():
            effort.show(f"{name}, round {number + 1} of {effort.rounds}")
            values[name].append(run())
    return values


def ratios(of: list[float], to: list[float]) -> list[float]:
    """Of each round's pair."""
    return [a / b for a, b in zip(of, to, strict=True)]

"""What a client counts, in bounded memory: it travels as JSON and adds up over clients."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

_PER_OCTAVE = 64
_OCTAVES = 36
KEPT_EXAMPLES = 5


class LatencyHistogram:
    """Microseconds in buckets about 1 % wide, from 1 us to a day; the greatest is kept as it was."""

    def __init__(self) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(_PER_OCTAVE * _OCTAVES, np.int64)
        self.greatest = 0.0

    def add(self, us: float) -> None:
        bucket = int(math.log2(us) * _PER_OCTAVE) if us > 1.0 else 0
        self.counts[min(bucket, len(self.counts) - 1)] += 1
        if us > self.greatest:
            self.greatest = us

    def merge(self, other: LatencyHistogram) -> None:
        self.counts += other.counts
        self.greatest = max(self.greatest, other.greatest)

    def percentile(self, q: float) -> float:
        """The middle of the bucket that holds it; 0 if nothing was counted."""
        total = int(self.counts.sum())
        if total == 0:
            return 0.0
        bucket = int(np.searchsorted(np.cumsum(self.counts), math.ceil(total * q / 100.0)))
        return min(float(2.0 ** ((bucket + 0.5) / _PER_OCTAVE)), self.greatest)

    def to_json(self) -> dict[str, Any]:
        used = np.flatnonzero(self.counts)
        return {"buckets": used.tolist(), "counts": self.counts[used].tolist(), "greatest": self.greatest}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> LatencyHistogram:
        histogram = cls()
        histogram.counts[np.array(document["buckets"], np.int64)] = document["counts"]
        histogram.greatest = float(document["greatest"])
        return histogram


@dataclass(slots=True)
class Tally:
    """Counts of steps unless the name says otherwise."""

    sent: int = 0
    completed: int = 0
    tokens: int = 0
    """Of completed steps."""
    cancelled: int = 0
    """Of submissions that were cancelled as asked, or followed one that was."""
    closed: int = 0
    """Outstanding when their session was closed as asked."""
    failed: int = 0
    """Ended, or were refused, in a way that nothing here had asked for."""
    wrong: int = 0
    """Answers, positions and held rows that are not what they must be."""
    lost: int = 0
    """Not settled by the deadline."""
    full: int = 0
    """Calls that raised Full, and were made again later."""
    cancels: int = 0
    cancels_late: int = 0
    """Calls of cancel() that came after the answer."""
    rewinds: int = 0
    sessions_opened: int = 0
    sessions_closed: int = 0
    pipelined: int = 0
    """Submissions made while an earlier one of their session was outstanding."""
    rows_checked: int = 0
    patterns_checked: int = 0
    """Raw rows that were compared at every index."""
    leases_held: int = 0
    """Leases kept for a while and compared again at the end of it."""
    drafts_accepted: int = 0
    """Drafted tokens."""
    connects: int = 0
    generations: int = 0
    stops: int = 0
    """Generations that a stop token ended."""
    expired: int = 0
    """Of submissions whose deadline passed."""
    forks: int = 0
    unseen: int = 0
    """The most that the scheduler may have queued by itself, and dropped again, without a client having seen it."""
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    blamed: Counter[str] = field(default_factory=Counter)
    """Steps that ended because a process did or something ran short, by the error's kind and ``flight.blame``: ``EngineDied 1234``."""
    errors: Counter[str] = field(default_factory=Counter)
    """Kinds of unexpected errors, each with how often it came."""
    examples: list[str] = field(default_factory=list)
    """The first few of what went wrong, in words."""

    def say_wrong(self, what: str) -> None:
        self.wrong += 1
        self._example(f"wrong: {what}")

    def say_failed(self, error: BaseException, steps: int, where: str) -> None:
        self.failed += steps
        self.errors[type(error).__name__] += 1
        self._example(f"failed: {where}: {type(error).__name__}: {error}")

    def say_blamed(self, error: BaseException, steps: int, blamed: str) -> None:
        self.blamed[f"{type(error).__name__} {blamed}"] += steps

    def _example(self, text: str) -> None:
        if len(self.examples) < KEPT_EXAMPLES:
            self.examples.append(text)

    def merge(self, other: Tally) -> None:
        for name in _counts():
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.latency.merge(other.latency)
        self.blamed += other.blamed
        self.errors += other.errors
        self.examples = (self.examples + other.examples)[:KEPT_EXAMPLES]

    def to_json(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in _counts()}
        return {
            **counts,
            "latency": self.latency.to_json(),
            "blamed": dict(self.blamed),
            "errors": dict(self.errors),
            "examples": self.examples,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Tally:
        counts = {name: int(document[name]) for name in _counts()}
        return cls(
            **counts,
            latency=LatencyHistogram.from_json(document["latency"]),
            blamed=Counter(document["blamed"]),
            errors=Counter(document["errors"]),
            examples=[str(text) for text in document["examples"]],
        )


def _counts() -> list[str]:
    return [f.name for f in fields(Tally) if f.type == "int"]

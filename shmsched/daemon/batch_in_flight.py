"""The batch that an engine runs, and what is remembered of it."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from shmsched.daemon.state import Step

_is_plain = attrgetter("wanted.plain")


class BatchInFlight:
    """``number`` counts within this incarnation of the engine."""

    __slots__ = ("lengths", "number", "plain", "started", "steps")

    def __init__(self, number: int, steps: list[Step], started: float) -> None:
        self.number = number
        self.steps = steps
        self.started = started
        self.plain = all(map(_is_plain, steps))
        """Every step is."""
        self.lengths: list[int] = []
        """How many tokens each step has."""


class BatchSummary(NamedTuple):
    """What ``status`` tells of a batch that ended."""

    number: int
    decodes: int
    prefill_chunks: int
    tokens: int
    seconds: float
    ended: float

"""The batch that an engine runs, and what it goes on with after it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from shmsched.daemon.state import Session, Step

_is_plain = attrgetter("wanted.plain")
_generation = attrgetter("wanted.generation")


class BatchInFlight:
    """``number`` counts within this incarnation of the engine."""

    __slots__ = ("_given", "generates", "lengths", "number", "places", "plain", "size", "started", "steps")

    def __init__(self, number: int, steps: list[Step], started: float, given: list[Session] | None = None) -> None:
        """``given``: the sessions whose steps the engine was given, where some of them are none any more."""
        self._given = given
        self.number = number
        self.steps = steps
        """Those whose answers count."""
        self.size = len(steps) if given is None else len(given)
        """How many steps the engine was given."""
        self.started = started
        self.plain = all(map(_is_plain, steps))
        """Every step is."""
        self.generates = None not in map(_generation, steps)
        """Every step is of a generation, and has the one token that this goes on with."""
        self.places: list[int] | None = None
        """Which of those that the engine was given the steps are; None for all."""
        self.lengths: list[int] = []
        """How many tokens each step has."""

    @property
    def answers(self) -> list[int] | None:
        """How many sampled tokens answer each step that the engine was given; None for one each."""
        return None if self.plain or self._given is not None else [step.wanted.n_results for step in self.steps]

    @property
    def sessions(self) -> list[Session]:
        """Those that the engine was given a step of."""
        return [step.session for step in self.steps] if self._given is None else self._given


class Following(NamedTuple):
    """The decodes that an engine was told to go on with once it has finished its batch: steps only from then on, if they still are
    to come. Whose generation has ended meanwhile is in the engine's batch, and nothing comes of it."""

    number: int
    after: list[int]
    """Which steps of the batch that runs they come after."""
    sessions: list[Session]
    deadline: float
    """The first of theirs."""

    def begin(self, followers: Sequence[Step | None], now: float) -> BatchInFlight:
        """``followers``: what comes after each step of the batch that has ended. The engine runs them by now."""
        steps, places = [], []
        for place, k in enumerate(self.after):
            follower = followers[k] if followers else None
            if follower is not None:
                steps.append(follower)
                places.append(place)
        batch = BatchInFlight(self.number, steps, now, self.sessions)
        batch.lengths = [1] * len(steps)
        if len(steps) < len(self.after):
            batch.places = places
        return batch

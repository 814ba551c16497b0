"""When an engine is given what comes after its batch: late in a long one, and at once in a short one."""

from __future__ import annotations

import time

import pytest

from shmsched.daemon.foresight import Foresight

from faults.generating import DONE, Generations
from fuzz.world import World
from processes.leftovers import wait_until

STEP_S = 0.6
SHARE = 0.5


@pytest.fixture
def pair(world: World) -> Generations:
    """Its engine runs batch 2, which began just now, and takes 0.6 s for one."""
    pair = Generations(world)
    (link,) = world.daemon.engines.links.values()
    link._foresight = Foresight(SHARE)
    assert link.batch is not None
    link.batch.started -= STEP_S
    pair.answer(1, (DONE, 5), (DONE, 6))
    return pair


def test_what_comes_after_a_long_batch_is_given_once_its_share_is_over(world: World, pair: Generations) -> None:
    began = time.monotonic()

    def given() -> bool:
        world.turn()
        if time.monotonic() < began + 0.6 * SHARE * STEP_S:
            assert pair.engine.batches == [2], "it was given too early"
        return pair.engine.batches == [2, 3]

    wait_until(given, "the engine to be given what comes after its batch")
    assert [(position, place) for _, position, place in pair.given(3)] == [(2, 0), (2, 1)]


def test_whoever_comes_before_is_in_the_very_next_batch(pair: Generations) -> None:
    began = time.monotonic()
    pair.open_session(3)
    pair.submit((3, 0, 0))
    pair.answer(2, (DONE, 5), (DONE, 6))
    assert time.monotonic() < began + SHARE * STEP_S, "this machine is too slow to tell anything"
    assert sorted(position for _, position, _ in pair.given(3)) == [0, 2, 2]


def test_a_batch_that_ends_sooner_than_foreseen_is_followed_by_one_as_any_other(pair: Generations) -> None:
    pair.answer(2, (DONE, 5), (DONE, 6))
    assert pair.engine.batches[0] == 3
    assert [(position, token) for _, position, token in pair.given(3)] == [(2, 5), (2, 6)]
    # The last one was short, and so is the next: what comes after it is given at once.
    assert pair.engine.batches == [3, 4]


def test_a_shorter_batch_is_not_measured_by_a_longer_one_before_it(world: World, pair: Generations) -> None:
    (link,) = world.daemon.engines.links.values()
    foresight = link._foresight
    assert foresight._timer is not None
    long = foresight._timer.when
    assert link.batch is not None
    link.batch.started -= STEP_S / 10
    pair.answer(2, (DONE, 5), (DONE, 6))
    assert pair.engine.batches == [3]
    assert foresight._timer.when < long
    assert foresight._timer.pending


def test_an_engine_that_has_gone_is_not_looked_at_any_more(world: World, pair: Generations) -> None:
    (link,) = world.daemon.engines.links.values()
    link._foresight.end()
    link._foresight._timer = None
    pair.engine.close()
    world.turn()
    assert link._foresight._timer is None


def test_nothing_is_given_ahead_to_an_engine_that_has_gone(world: World, pair: Generations) -> None:
    (link,) = world.daemon.engines.links.values()
    pair.engine.close()
    world.turn()
    assert link._foresight._timer is not None
    assert not link._foresight._timer.pending

"""When an engine is given what comes after its batch: late in a long one, and at once in a short one."""

from __future__ import annotations

import pytest

from support.generations import DONE, Generations
from support.world import World

STEP_S = 0.6
SHARE = 0.5
pytestmark = pytest.mark.parametrize("world", [{"ahead_share": SHARE}], indirect=True, ids=[""])


@pytest.fixture
def pair(world: World) -> Generations:
    """Its engine runs batch 2, which began just now, and takes 0.6 s for one."""
    pair = Generations(world, step_s=STEP_S)
    pair.answer(1, (DONE, 5), (DONE, 6))
    assert pair.engine.batches == [2]
    return pair


def test_what_comes_after_a_long_batch_is_given_once_its_share_is_over(world: World, pair: Generations) -> None:
    world.pass_time(0.95 * SHARE * STEP_S)
    assert pair.engine.batches == [2], "it was given too early"
    world.pass_time(0.1 * SHARE * STEP_S)
    assert pair.engine.batches == [2, 3]
    assert [(position, place) for _, position, place in pair.given(3)] == [(2, 0), (2, 1)]


def test_whoever_comes_before_is_in_the_very_next_batch(world: World, pair: Generations) -> None:
    world.pass_time(0.95 * SHARE * STEP_S)
    pair.open_session(3)
    pair.submit((3, 0, 0))
    pair.answer(2, (DONE, 5), (DONE, 6))
    assert sorted(position for _, position, _ in pair.given(3)) == [0, 2, 2]


def test_a_batch_that_ends_sooner_than_foreseen_is_followed_by_one_as_any_other(pair: Generations) -> None:
    pair.step_s = 0.0
    pair.answer(2, (DONE, 5), (DONE, 6))
    assert [(position, token) for _, position, token in pair.given(3)] == [(2, 5), (2, 6)]
    # The last one was short, and so is the next: what comes after it is given at once.
    assert pair.engine.batches == [3, 4]


def test_a_shorter_batch_is_not_measured_by_a_longer_one_before_it(world: World, pair: Generations) -> None:
    pair.step_s = STEP_S / 10
    pair.answer(2, (DONE, 5), (DONE, 6))
    assert pair.engine.batches == [3]
    world.pass_time(1.1 * SHARE * pair.step_s)
    assert pair.engine.batches == [3, 4]


def test_an_engine_that_has_gone_is_not_looked_at_any_more(world: World, pair: Generations) -> None:
    before = world.timers
    world.leave(pair.engine)
    world.turn()
    assert world.timers < before
    # As of one that has ended already.
    world.pass_time(STEP_S)
    world.check()

"""When a client is told of the tokens of its generations, and of the parts of its prompts."""

from __future__ import annotations

from shmsched.daemon.telling import PAUSE_S

from support.generations import DONE, STOP, Generations
from support.world import World


def told(pair: Generations) -> tuple[int, int]:
    """How many completions and how many tokens of generations that go on the client knows of."""
    records, _, streamed = pair.client.cursors
    return records, streamed


def test_tokens_of_generations_that_go_on_are_told_together_after_a_pause(world: World) -> None:
    pair = Generations(world)
    pair.answer(1, (DONE, 5), (DONE, 6))
    assert told(pair) == (0, 2), "nothing was told just before, so there is nothing to wait for"
    for batch in (2, 3):
        pair.answer(batch, (DONE, 5), (DONE, 6))
    world.pass_time(0.9 * PAUSE_S)
    assert told(pair) == (0, 2)
    world.pass_time(0.2 * PAUSE_S)
    assert told(pair) == (0, 6)
    # Afterwards, as before.
    world.pass_time(1.1 * PAUSE_S)
    pair.answer(4, (DONE, 5), (DONE, 6))
    assert told(pair) == (0, 8)
    pair.answer(5, (DONE, 5), (DONE, 6))
    assert told(pair) == (0, 8)
    world.pass_time(1.1 * PAUSE_S)
    assert told(pair) == (0, 10)


def test_the_end_of_a_generation_is_told_at_once_and_what_came_before_it_with_it(world: World) -> None:
    pair = Generations(world)
    pair.answer(1, (DONE, 5), (DONE, 6))
    pair.answer(2, (DONE, 5), (DONE, 6))
    assert told(pair) == (0, 2)
    pair.answer(3, (DONE, STOP), (DONE, 6))
    assert told(pair) == (1, 5)


def test_many_tokens_are_told_at_once(world: World) -> None:
    pair = Generations(world, further=(18, 18))
    pair.answer(1, (DONE, 5), (DONE, 6))
    for batch in range(2, 10):
        pair.answer(batch, (DONE, 5), (DONE, 6))
        assert told(pair) == (0, 2)
    pair.answer(10, (DONE, 5), (DONE, 6))
    assert told(pair) == (0, 20), "a quarter of the room was filled without a word"


def test_chunks_behind_which_there_is_more_of_the_prompt_are_told_with_something_else(world: World) -> None:
    pair = Generations(world, further=(0, 0))
    pair.answer(1, (DONE, 5), (DONE, 6))
    assert told(pair) == (2, 0)
    # Chunks of four tokens, and room for three of them in a batch. Only the last one has a row.
    pair.submit_chunks(1, [(1 + 4 * i, 4, int(i == 4), i < 4) for i in range(5)])
    world.pass_time(1.1 * PAUSE_S)
    pair.answer(2, *[(DONE, 0)] * 3)
    assert told(pair) == (2, 0), "the client was woken for nothing that it waits for"
    pair.answer(3, (DONE, 5), (DONE, 7))
    assert told(pair) == (7, 0)


def test_chunks_are_told_after_a_pause_where_nothing_else_is(world: World) -> None:
    pair = Generations(world, further=(0, 0))
    pair.answer(1, (DONE, 5), (DONE, 6))
    pair.submit_chunks(1, [(1 + 4 * i, 4, int(i == 4), i < 4) for i in range(5)])
    pair.answer(2, *[(DONE, 0)] * 3)
    world.pass_time(1.1 * PAUSE_S)
    assert told(pair) == (5, 0)


def test_submissions_without_output_are_told_at_once_though_there_are_more(world: World) -> None:
    """Somebody may wait for each of them."""
    pair = Generations(world, further=(0, 0))
    pair.answer(1, (DONE, 5), (DONE, 6))
    pair.submit_chunks(1, [(1 + 4 * i, 4, 0, False) for i in range(5)])
    assert told(pair) == (2, 0)
    pair.answer(2, *[(DONE, 0)] * 3)
    assert told(pair) == (5, 0)


def test_one_timer_is_enough_for_all_that_is_told_later(world: World) -> None:
    pair = Generations(world, further=(30, 30))
    pair.answer(1, (DONE, 5), (DONE, 6))
    before = world.timers
    for batch in range(2, 8):
        pair.answer(batch, (DONE, 5), (DONE, 6))
    assert world.timers <= before + 1

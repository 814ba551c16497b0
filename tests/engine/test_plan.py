"""From the steps of a batch to forward passes: nothing lost, nothing twice, nothing out of order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shmsched.engine.plan import gather, passes, wanted
from shmsched.memory.layouts import StepEntry
from shmsched.steps import OutputRows

ROWS = st.sampled_from([OutputRows.NONE, OutputRows.LAST, OutputRows.ALL])


def entry(slot: int, start: int, length: int, position: int, rows: OutputRows = OutputRows.LAST) -> StepEntry:
    return StepEntry(slot, start, length, position, rows, 1, 0, 0.0, 1.0, 0, 0, 0)


@st.composite
def batches(draw: st.DrawFn) -> list[StepEntry]:
    """Several sessions, their chunks between one another's; most go on where the last ended, some rewind."""
    lengths: dict[int, int] = {}
    entries, start = [], 0
    for slot, length, rows, rewinds in draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), ROWS, st.integers(0, 5)), min_size=1, max_size=14)
    ):
        at = lengths.get(slot, draw(st.integers(0, 50)))
        position = at if rewinds else draw(st.integers(0, at))
        entries.append(entry(slot, start, length, position, rows))
        start += length
        lengths[slot] = position + length
    return entries


def tokens_of(entries: list[StepEntry]) -> np.ndarray:
    return np.arange(1000, 1000 + sum(e.length for e in entries), dtype=np.int32)


@given(batches())
def test_every_step_is_in_exactly_one_row(entries: list[StepEntry]) -> None:
    steps = [i for rows in passes(entries) for row in rows for i in row.steps]
    assert sorted(steps) == list(range(len(entries)))


@given(batches())
def test_a_row_is_one_session_without_gaps_and_a_session_has_one_row_a_pass(entries: list[StepEntry]) -> None:
    for rows in passes(entries):
        assert rows, "a pass without rows"
        assert len({row.slot for row in rows}) == len(rows)
        for row in rows:
            assert {entries[i].slot for i in row.steps} == {row.slot}
            position = row.position
            for i in row.steps:
                assert entries[i].position == position
                position += entries[i].length
            assert position == row.end == row.position + row.length


@given(batches())
def test_a_session_s_steps_run_in_their_order_over_all_passes(entries: list[StepEntry]) -> None:
    ran: dict[int, list[int]] = {}
    for rows in passes(entries):
        for row in rows:
            ran.setdefault(row.slot, []).extend(row.steps)
    for steps in ran.values():
        assert steps == sorted(steps)


@given(batches())
def test_there_are_as_many_passes_as_the_most_broken_session_needs(entries: list[StepEntry]) -> None:
    pieces: dict[int, int] = {}
    ends: dict[int, int] = {}
    for e in entries:
        if ends.get(e.slot) != e.position:
            pieces[e.slot] = pieces.get(e.slot, 0) + 1
        ends[e.slot] = e.position + e.length
    assert len(passes(entries)) == max(pieces.values())


@given(batches())
def test_sessions_keep_the_order_of_the_batch(entries: list[StepEntry]) -> None:
    """Decodes first is how the scheduler made it, and what the engine was promised."""
    (first, *_) = passes(entries)
    slots = [row.slot for row in first]
    assert slots == list(dict.fromkeys(e.slot for e in entries))


@given(batches())
def test_tokens_positions_and_outputs_of_a_pass_are_those_of_its_steps(entries: list[StepEntry]) -> None:
    tokens = tokens_of(entries)
    for rows in passes(entries):
        flat, positions = gather(rows, entries, tokens)
        outputs, owners, within = wanted(rows, entries)
        assert flat.dtype == positions.dtype == np.int32
        assert flat.flags.c_contiguous
        assert positions.flags.c_contiguous
        expected_tokens: list[int] = []
        expected_positions: list[int] = []
        expected_outputs: list[tuple[int, int, int]] = []
        for row in rows:
            for i in row.steps:
                e = entries[i]
                base = len(expected_tokens)
                expected_tokens += tokens[e.start : e.start + e.length].tolist()
                expected_positions += range(e.position, e.position + e.length)
                places = {0: [], 1: [e.length - 1], 2: list(range(e.length))}[e.output_rows]
                expected_outputs += [(base + place, i, r) for r, place in enumerate(places)]
        assert flat.tolist() == expected_tokens
        assert positions.tolist() == expected_positions
        assert list(zip(outputs, owners, within, strict=True)) == expected_outputs
        assert outputs == sorted(set(outputs))


def test_chunks_of_one_session_that_continue_one_another_are_one_row() -> None:
    entries = [entry(7, 0, 1, 30), entry(4, 1, 3, 0), entry(5, 4, 2, 9), entry(4, 6, 2, 3)]
    (rows,) = passes(entries)
    assert [(row.slot, row.position, row.length, row.steps) for row in rows] == [
        (7, 30, 1, [0]),
        (4, 0, 5, [1, 3]),
        (5, 9, 2, [2]),
    ]
    flat, positions = gather(rows, entries, tokens_of(entries))
    assert flat.tolist() == [1000, 1001, 1002, 1003, 1006, 1007, 1004, 1005]
    assert positions.tolist() == [30, 0, 1, 2, 3, 4, 9, 10]


def test_a_rewind_waits_for_a_second_pass() -> None:
    entries = [entry(4, 0, 3, 0), entry(5, 3, 1, 8), entry(4, 4, 2, 1)]
    first, second = passes(entries)
    assert [row.steps for row in first] == [[0], [1]]
    assert [row.steps for row in second] == [[2]]
    flat, positions = gather(second, entries, tokens_of(entries))
    assert (flat.tolist(), positions.tolist()) == ([1004, 1005], [1, 2])


def test_a_batch_in_order_is_not_copied() -> None:
    entries = [entry(1, 0, 1, 5), entry(2, 1, 4, 0)]
    tokens = tokens_of(entries)
    flat, _ = gather(passes(entries)[0], entries, tokens)
    assert np.shares_memory(flat, tokens)

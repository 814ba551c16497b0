"""From the steps of a batch to forward passes: nothing lost, nothing twice, nothing out of order."""

from __future__ import annotations

import mmap

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from shmsched.dataplane.layouts import SAMPLING, STEP, StepEntry
from shmsched.engine.batch_slot import Pulled
from shmsched.engine.batch_view import StepRow
from shmsched.engine.outcome import BatchOutcome
from shmsched.engine.plan import Row, gather, passes, wanted
from shmsched.engine.straight_view import StraightView
from shmsched.params import OutputRows, SamplingParams

ROWS = st.sampled_from([OutputRows.NONE, OutputRows.LAST, OutputRows.ALL])


def entry(slot: int, start: int, length: int, position: int, rows: OutputRows = OutputRows.LAST) -> StepEntry:
    return StepEntry(slot, start, length, position, rows, 1, SAMPLING.pack(0, 0.0, 1.0, slot), 0, 64 * slot)


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


# --- a batch that is one pass as it stands is its own plan ----------------------------------------------------------------

NONE, LAST = OutputRows.NONE, OutputRows.LAST


@st.composite
def mostly_straight(draw: st.DrawFn) -> tuple[list[StepEntry], dict[int, int]]:
    """Steps and the lengths of their sessions; in half of the batches something is not as where each session just goes on."""
    slots = draw(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=draw(st.booleans())))
    lengths = {slot: draw(st.integers(0, 50)) for slot in slots}
    odd = draw(st.sampled_from([*range(len(slots)), *[None] * len(slots)]))
    with_chunks = draw(st.booleans())
    entries, start = [], 0
    for i, slot in enumerate(slots):
        length, position, rows = 1, lengths[slot], LAST
        if with_chunks:
            length, rows = draw(st.integers(1, 4)), draw(st.sampled_from([LAST, LAST, NONE]))
        if i == odd:
            length, rows = draw(st.integers(1, 3)), draw(ROWS)
            position = draw(st.integers(0, position + 1))
        step = entry(slot, start, length, position, rows)
        if draw(st.booleans()):
            step = step._replace(sampled=0, sampling=bytes(SAMPLING.size))
        entries.append(step)
        start += length
    if draw(st.booleans()):
        lengths.pop(slots[0])
    return entries, lengths


def pulled(entries: list[StepEntry]) -> Pulled:
    return Pulled(b"".join([STEP.pack(*e) for e in entries]), tokens_of(entries))


def view_of(entries: list[StepEntry], lengths: dict[int, int]) -> StraightView | None:
    arena = mmap.mmap(-1, 1 << 12)
    return StraightView.of(pulled(entries), lengths, {0: arena}, 9)


@given(mostly_straight())
def test_a_batch_in_which_each_session_goes_on_is_one_whose_plan_is_the_batch_itself(
    batch: tuple[list[StepEntry], dict[int, int]],
) -> None:
    entries, lengths = batch
    tokens = tokens_of(entries)
    n = len(entries)
    plan = passes(entries)
    flat, positions = gather(plan[0], entries, tokens)
    outputs, owners, within = wanted(plan[0], entries)
    as_it_stands = (
        [[(row.slot, row.position, row.steps, row.length) for row in rows] for rows in plan]
        == [[(e.slot, e.position, [i], e.length) for i, e in enumerate(entries)]]
        and all(lengths.get(e.slot) == e.position for e in entries)
        and (owners, within) == ([i for i, e in enumerate(entries) if e.output_rows != NONE], [0] * len(owners))
    )
    view = view_of(entries, lengths)
    # ALL of one token is the same row as LAST; that such a batch goes the long way costs it time and nothing else.
    if view is None:
        assert not as_it_stands or OutputRows.ALL in [e.output_rows for e in entries]
        return
    assert as_it_stands
    # It shows the engine what the view of any batch does.
    assert list(view.owners) == owners
    assert view.tokens.tolist() == flat.tolist()
    assert (view.positions.dtype, view.positions.tolist()) == (np.int32, positions.tolist())
    assert (view.outputs.dtype, view.outputs.tolist()) == (np.int32, outputs)
    rows = [StepRow(e.slot, e.start, e.length) for e in entries]
    assert list(view.steps) == rows == [view.steps[i] for i in range(n)] == view.steps[:]
    assert {type(row) for row in view.steps} == {StepRow}
    assert (len(view.steps), view.steps[-1]) == (n, rows[-1])
    params = [SamplingParams(0.0, 1.0, 0, entries[i].slot) if entries[i].sampled else None for i in owners]
    assert list(view.sampling) == params == [view.sampling[k] for k in range(len(owners))] == view.sampling[:]
    assert len(view.sampling) == len(owners)
    assert (None in view.sampling) == (None in params)
    assert all(param in view.sampling for param in params)
    assert [row is None for row in view._raw_rows] == [bool(entries[i].sampled) for i in owners]
    assert view.wants_raw == (None in params)


@given(mostly_straight(), st.data())
def test_answers_noted_at_once_are_those_noted_one_by_one(
    batch: tuple[list[StepEntry], dict[int, int]], data: st.DataObject
) -> None:
    entries = [e._replace(output_rows=min(e.output_rows, LAST)) for e in batch[0]]
    view = view_of(entries, {e.slot: e.position for e in entries})
    assume(view is not None)
    assert view is not None
    ids = {k: data.draw(st.integers(-1, 9)) for k, i in enumerate(view.owners) if entries[i].sampled}
    logprobs = {k: data.draw(st.floats(-9, 0, width=32)) for k in ids}
    if len(ids) == len(view.owners) and data.draw(st.booleans()):
        view.set_tokens(0, list(ids.values()), list(logprobs.values()))
    else:
        for k in ids:
            view.set_tokens(k, [ids[k]], [logprobs[k]])
    for k in view._raw_outputs:
        view.rows[k][:] = 0
    results = view.results()
    if results is None:
        assert not all(0 <= token < 9 for token in ids.values())
        return
    one_by_one = BatchOutcome(entries)
    for i, e in enumerate(entries):
        one_by_one.done(Row(e.slot, e.position, [i], e.length))
    for k, i in enumerate(view.owners):
        if k in ids:
            assert 0 <= ids[k] < 9
            one_by_one.set_token(i, 0, ids[k], logprobs[k])
    assert results == one_by_one.results()
    assert view.token_ids.tolist() == [ids.get(k, -1) for k in range(len(view.owners))]

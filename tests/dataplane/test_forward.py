"""From the steps of a batch to forward passes: nothing lost, nothing twice, nothing out of order."""

from __future__ import annotations

import mmap
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shmsched.dataplane.forward import Batch, Outcome, Pass
from shmsched.dataplane.layouts import SAMPLING, STEP, StepEntry, StepStatus
from shmsched.engine.batch_view import StepRow
from shmsched.engine.pass_view import PassView, StepRows
from shmsched.params import OutputRows, SamplingParams

ROWS = st.sampled_from([OutputRows.NONE, OutputRows.LAST, OutputRows.ALL])
VOCAB = 9


def entry(slot: int, start: int, length: int, position: int, rows: OutputRows = OutputRows.LAST) -> StepEntry:
    return StepEntry(slot, start, length, position, rows, 1, SAMPLING.pack(0, 0.0, 1.0, slot), 0, 64 * slot)


@st.composite
def batches(draw: st.DrawFn) -> list[StepEntry]:
    """Several sessions, their chunks between one another's; most go on where the last ended, some rewind; some want raw rows."""
    lengths: dict[int, int] = {}
    entries, start = [], 0
    for slot, length, rows, rewinds, sampled in draw(
        st.lists(
            st.tuples(st.integers(0, 3), st.integers(1, 5), ROWS, st.integers(0, 5), st.booleans()),
            min_size=1,
            max_size=14,
        )
    ):
        at = lengths.get(slot, draw(st.integers(0, 50)))
        position = at if rewinds else draw(st.integers(0, at))
        entries.append(entry(slot, start, length, position, rows)._replace(sampled=int(sampled)))
        start += length
        lengths[slot] = position + length
    return entries


@st.composite
def mostly_straight(draw: st.DrawFn) -> tuple[list[StepEntry], dict[int, int]]:
    """Steps and the lengths of their sessions; in half of the batches something is not as where each session just goes on."""
    slots = draw(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=draw(st.booleans())))
    lengths = {slot: draw(st.integers(0, 50)) for slot in slots}
    odd = draw(st.sampled_from([*range(len(slots)), *[None] * len(slots)]))
    with_chunks = draw(st.booleans())
    entries, start = [], 0
    for i, slot in enumerate(slots):
        length, position, rows = 1, lengths[slot], OutputRows.LAST
        if with_chunks:
            length, rows = draw(st.integers(1, 4)), draw(ROWS)
        if i == odd:
            length, position = draw(st.integers(1, 3)), draw(st.integers(0, position + 1))
        step = entry(slot, start, length, position, rows)
        if draw(st.booleans()):
            step = step._replace(sampled=0, sampling=bytes(SAMPLING.size))
        entries.append(step)
        start += length
    if draw(st.booleans()):
        lengths.pop(slots[0])
    return entries, lengths


def tokens_of(entries: list[StepEntry]) -> np.ndarray:
    return np.arange(1000, 1000 + sum(e.length for e in entries), dtype=np.int32)


def pulled(entries: list[StepEntry]) -> Batch:
    return Batch(b"".join([STEP.pack(*e) for e in entries]), tokens_of(entries))


def passes(entries: list[StepEntry], left_out: set[int] | None = None) -> list[list[list[int]]]:
    """The steps of each row of each pass."""
    return pulled(entries).passes(left_out or set())


def view_of(this: Pass) -> PassView:
    return PassView(this, StepRows().of(this), {0: mmap.mmap(-1, 1 << 12)}, VOCAB)


def outputs_of(row: list[int], entries: list[StepEntry]) -> list[tuple[int, int, int]]:
    """Of each output of a row: where in the row its token is, its step, and which of the step's rows it is."""
    found, base = [], 0
    for i in row:
        length = entries[i].length
        places = {0: [], 1: [length - 1], 2: list(range(length))}[entries[i].output_rows]
        found += [(base + place, i, r) for r, place in enumerate(places)]
        base += length
    return found


@given(batches())
def test_every_step_is_in_exactly_one_row(entries: list[StepEntry]) -> None:
    steps = [i for rows in passes(entries) for row in rows for i in row]
    assert sorted(steps) == list(range(len(entries)))


@given(batches())
def test_a_row_is_one_session_without_gaps_and_a_session_has_one_row_a_pass(entries: list[StepEntry]) -> None:
    for rows in passes(entries):
        assert rows, "a pass without rows"
        assert len({entries[row[0]].slot for row in rows}) == len(rows)
        for row in rows:
            assert len({entries[i].slot for i in row}) == 1
            position = entries[row[0]].position
            for i in row:
                assert entries[i].position == position
                position += entries[i].length


@given(batches())
def test_a_session_s_steps_run_in_their_order_over_all_passes(entries: list[StepEntry]) -> None:
    ran: dict[int, list[int]] = {}
    for rows in passes(entries):
        for row in rows:
            ran.setdefault(entries[row[0]].slot, []).extend(row)
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
    slots = [entries[row[0]].slot for row in first]
    assert slots == list(dict.fromkeys(e.slot for e in entries))


@given(batches(), st.data())
def test_steps_that_are_left_out_are_in_no_row(entries: list[StepEntry], data: st.DataObject) -> None:
    out = data.draw(st.sets(st.sampled_from(range(len(entries)))))
    steps = [i for rows in passes(entries, out) for row in rows for i in row]
    assert sorted(steps) == sorted(set(range(len(entries))) - out)


@given(batches())
def test_a_pass_shows_the_engine_what_its_steps_say(entries: list[StepEntry]) -> None:
    tokens, batch = tokens_of(entries), pulled(entries)
    for rows in batch.passes(()):
        shows_what_its_steps_say(Pass(batch, rows), rows, entries, tokens)


def shows_what_its_steps_say(this: Pass, rows: list[list[int]], entries: list[StepEntry], tokens: np.ndarray) -> None:
    view = view_of(this)
    expected_tokens: list[int] = []
    expected_positions: list[int] = []
    expected_outputs: list[tuple[int, int, int]] = []
    expected_steps = []
    for row in rows:
        base = len(expected_tokens)
        expected_outputs += [(base + token, i, r) for token, i, r in outputs_of(row, entries)]
        for i in row:
            e = entries[i]
            expected_tokens += tokens[e.start : e.start + e.length].tolist()
            expected_positions += range(e.position, e.position + e.length)
        expected_steps.append(StepRow(entries[row[0]].slot, base, len(expected_tokens) - base))
    for array, expected in (
        (view.tokens, expected_tokens),
        (view.positions, expected_positions),
        (view.outputs, [token for token, _, _ in expected_outputs]),
    ):
        assert (array.dtype, array.flags.c_contiguous, array.tolist()) == (np.int32, True, expected)
    assert list(zip(*this.outputs(), strict=True)) == expected_outputs
    assert (list(view.steps), {type(row) for row in view.steps}) == (expected_steps, {StepRow})
    assert [list(this.steps_of(i)) for i in range(len(rows))] == rows
    owners = [i for _, i, _ in expected_outputs]
    assert len(view.rows) == len(view.sampling) == this.n_outputs == len(owners)
    params = [SamplingParams(0.0, 1.0, 0, entries[i].slot) if entries[i].sampled else None for i in owners]
    assert list(view.sampling) == params == [view.sampling[k] for k in range(len(owners))] == view.sampling[:]
    assert (None in view.sampling) == (None in params)
    assert all(param in view.sampling for param in params)
    raw = [k for k, i in enumerate(owners) if not entries[i].sampled]
    assert (list(this.raw), [k for k, row in enumerate(view._raw_rows) if row is not None]) == (raw, raw)


def test_chunks_of_one_session_that_continue_one_another_are_one_row() -> None:
    entries = [entry(7, 0, 1, 30), entry(4, 1, 3, 0), entry(5, 4, 2, 9), entry(4, 6, 2, 3)]
    batch = pulled(entries)
    (rows,) = batch.passes(())
    assert rows == [[0], [1, 3], [2]]
    view = view_of(Pass(batch, rows))
    assert list(view.steps) == [(7, 0, 1), (4, 1, 5), (5, 6, 2)]
    assert view.tokens.tolist() == [1000, 1001, 1002, 1003, 1006, 1007, 1004, 1005]
    assert view.positions.tolist() == [30, 0, 1, 2, 3, 4, 9, 10]


def test_a_rewind_waits_for_a_second_pass() -> None:
    entries = [entry(4, 0, 3, 0), entry(5, 3, 1, 8), entry(4, 4, 2, 1)]
    batch = pulled(entries)
    first, second = batch.passes(())
    assert (first, second) == ([[0], [1]], [[2]])
    view = view_of(Pass(batch, second))
    assert (view.tokens.tolist(), view.positions.tolist()) == ([1004, 1005], [1, 2])


def test_a_batch_in_order_is_not_copied() -> None:
    entries = [entry(1, 0, 1, 5), entry(2, 1, 4, 0)]
    batch = pulled(entries)
    for rows in (None, *batch.passes(())):
        assert np.shares_memory(Pass(batch, rows).tokens, batch.tokens)


@given(mostly_straight())
def test_a_batch_in_which_each_session_goes_on_is_one_pass_as_it_stands(
    given_batch: tuple[list[StepEntry], dict[int, int]],
) -> None:
    entries, lengths = given_batch
    batch = pulled(entries)
    each_for_itself = [[i] for i in range(len(entries))]
    stands = all(lengths.get(e.slot) == e.position for e in entries)
    assert batch.is_one_pass(lengths) == (stands and batch.passes(()) == [each_for_itself])
    if batch.is_one_pass(lengths):
        this = Pass(batch, None)
        shows_what_its_steps_say(this, each_for_itself, entries, tokens_of(entries))
        held = dict(lengths)
        this.advance(held)
        assert held == lengths | {e.slot: e.position + e.length for e in entries}


@given(batches())
def test_tokens_lie_in_the_order_of_the_steps_whatever_the_passes(entries: list[StepEntry]) -> None:
    """Each output's token says whose it is."""
    batch = pulled(entries)
    outcome = Outcome(batch)
    for rows in batch.passes(()):
        assert not outcome.all_done()
        this = Pass(batch, rows)
        _, owners, within = this.outputs()
        ids = [10 * i + r for i, r in zip(owners, within, strict=True)]
        n = len(ids)
        outcome.done(this, struct.pack(f"{n}i", *ids), struct.pack(f"{n}f", *[-i for i in ids]))
    expected = [
        10 * i + r for i, e in enumerate(entries) if e.sampled for r in range(OutputRows(e.output_rows).count(e.length))
    ]
    assert memoryview(outcome.ids).cast("i").tolist() == expected
    assert memoryview(outcome.logprobs).cast("f").tolist() == [-i for i in expected]
    assert bytes(outcome.statuses) == bytes([StepStatus.DONE]) * len(entries)
    assert outcome.all_done()


@given(mostly_straight())
def test_a_batch_that_is_one_pass_as_it_stands_has_the_same_outcome_as_one_that_is_packed(
    given_batch: tuple[list[StepEntry], dict[int, int]],
) -> None:
    batch = pulled(given_batch[0])
    outcomes = []
    for rows in (None, [[i] for i in range(batch.n)]):
        this, outcome = Pass(batch, rows), Outcome(batch)
        ids = struct.pack(f"{this.n_outputs}i", *range(this.n_outputs))
        outcome.done(this, ids, ids)
        outcomes.append((outcome.statuses, outcome.ids, outcome.logprobs, outcome.all_done()))
    assert outcomes[0] == outcomes[1]


def test_what_is_said_of_steps_comes_in_their_order() -> None:
    batch = pulled([entry(slot, slot, 1, 0) for slot in range(4)])
    outcome = Outcome(batch)
    assert outcome.said() == ()
    outcome.stop(3, [3], StepStatus.FAILED, "last")
    outcome.stop(1, [1], StepStatus.DEFERRED, None)
    outcome.settle(0, StepStatus.SPOILT, "first")
    assert (outcome.said(), list(outcome.statuses)) == (("first", "last"), [6, 2, 0, 3])
    assert outcome.stopped == {3: 3, 1: 1}

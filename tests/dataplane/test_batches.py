"""What the scheduler writes of a batch is what the host reads, and what it reads back is checked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmsched.dataplane.batches import Batch, BatchSlot
from shmsched.dataplane.layouts import HEADER, STEP, BatchSlotLayout, StepEntry, StepStatus
from shmsched.dataplane.session import SPEC, Session, Step, StepSpec

MAX_TOKENS = 16
VOCAB = 100
U32, U64 = 2**32 - 1, 2**64 - 1
STEPS = st.tuples(
    st.integers(0, U32), st.integers(1, 4), st.integers(0, U32), st.integers(0, 2), st.booleans(), st.integers(0, U64)
)


def step_of(slot: int, n_tokens: int, position: int, rows: int, sampled: bool, rows_offset: int) -> Step:
    session = Session(1, None, 1, "", b"")
    session.slot = slot
    entry = SPEC.pack(rows, sampled, b"s" * 20, 7, rows_offset)
    tokens = np.arange(n_tokens, dtype="<i4").tobytes()
    n_rows = n_tokens if rows == 2 else rows
    return session.add(1, 1, n_tokens, n_rows, tokens, position, StepSpec(entry, rows, sampled), 0.0)


@given(st.lists(STEPS, min_size=1, max_size=4))
def test_the_table_of_a_batch_has_an_entry_for_each_step(described: list[tuple[int, int, int, int, bool, int]]) -> None:
    layout = BatchSlotLayout(MAX_TOKENS)
    memory = bytearray(layout.size)
    memory[layout.statuses_offset : layout.statuses_offset + 4] = b"\1" * 4
    batch = Batch(9, [step_of(*d) for d in described], 0.0)
    BatchSlot(memoryview(memory), MAX_TOKENS, VOCAB).write(batch)
    lengths = [d[1] for d in described]
    assert (batch.n_tokens, batch.n_decodes) == (sum(lengths), lengths.count(1))
    assert batch.n_results == sum(step.n_results for step in batch.steps)
    assert batch.raw == any(step.raw_rows for step in batch.steps)
    assert HEADER.unpack_from(memory) == (9, len(described), sum(lengths))
    table = memory[layout.steps_offset :][: STEP.size * len(described)]
    start = 0
    for entry, (slot, n, position, rows, sampled, offset) in zip(STEP.iter_unpack(table), described, strict=True):
        assert StepEntry._make(entry) == (slot, start, n, position, rows, sampled, b"s" * 20, 7, offset)
        start += n
    tokens = np.frombuffer(memory, "<i4", start, layout.tokens_offset).tolist()
    assert tokens == [token for n in lengths for token in range(n)]
    assert memory[layout.statuses_offset :][: len(described)] == bytes(len(described))


@pytest.mark.parametrize("given", [None, 2])
@pytest.mark.parametrize(
    ("statuses", "ids", "wrong"),
    [
        ((1, 1), (5, 99), None),
        ((1, 3), (5, -1), None),
        ((1, 0), (5, 5), "has status 0, which is none"),
        ((4, 1), (5, 5), "has status 4, which is none"),
        ((1, 1), (5, VOCAB), f"token {VOCAB} is outside the vocabulary of {VOCAB}"),
        ((1, 1), (-1, 5), "token -1 is outside"),
    ],
)
def test_results_are_checked(
    given: int | None, statuses: tuple[int, int], ids: tuple[int, int], wrong: str | None
) -> None:
    """``given``: where all that the engine was given followed other steps."""
    layout = BatchSlotLayout(MAX_TOKENS)
    memory = bytearray(layout.size)
    slot = BatchSlot(memoryview(memory), MAX_TOKENS, VOCAB)
    batch = Batch(1, [step_of(slot, 1, 0, 1, True, 0) for slot in (0, 1)], 0.0)
    slot.write(batch)
    if given is not None:
        batch.given = [step.session for step in batch.steps]
    memory[layout.statuses_offset : layout.statuses_offset + 2] = bytes(statuses)
    np.frombuffer(memory, "<i4", 2, layout.ids_offset)[:] = ids
    np.frombuffer(memory, "<f4", 2, layout.logprobs_offset)[:] = (-0.5, -2.0)
    said = ["no"] * statuses.count(StepStatus.FAILED)
    if wrong is None:
        assert slot.read(batch, said) is (not said)
        assert (batch.statuses, batch.ids, batch.logprobs) == (bytes(statuses), list(ids), [-0.5, -2.0])
        assert batch.messages == said
        with pytest.raises(ValueError, match=f"{len(said) + 1} messages came for {len(said)} failed steps"):
            slot.read(batch, [*said, "no"])
    else:
        with pytest.raises(ValueError, match=wrong):
            slot.read(batch, said)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([0, 2, 3, 4], (bytes([1, 2, 3, 1]), [5, -1, -1, 6], [0.5, 0.0, 0.0, 1.5], ["three"])),
        ([], (b"", [], [], [])),
    ],
)
def test_of_some_of_the_steps_that_failed_each_keeps_its_message(places: list[int], expected: object) -> None:
    batch = Batch(1, [], 0.0)
    batch.places = places
    batch.take_answers(bytes([1, 3, 2, 3, 1]), [5, -1, -1, -1, 6], [0.5, 0.0, 0.0, 0.0, 1.5], ["one", "three"])
    assert (batch.statuses, batch.ids, batch.logprobs, batch.messages) == expected


def test_what_follows_a_batch_goes_on_where_its_steps_end() -> None:
    layout = BatchSlotLayout(MAX_TOKENS)
    memory = bytearray(layout.size)
    steps = [step_of(3, 4, 10, 1, True, 0), step_of(5, 1, 7, 1, True, 0)]
    BatchSlot(memoryview(memory), MAX_TOKENS, VOCAB).write_following(8, steps, [1, 4])
    assert HEADER.unpack_from(memory) == (8, 2, 2)
    entries = [StepEntry._make(e) for e in STEP.iter_unpack(memory[layout.steps_offset :][: STEP.size * 2])]
    assert [(e.slot, e.start, e.length, e.position, e.sampling) for e in entries] == [
        (3, 0, 1, 14, b"s" * 20),
        (5, 1, 1, 8, b"s" * 20),
    ]
    assert np.frombuffer(memory, "<u4", 2, layout.tokens_offset).tolist() == [1, 4]

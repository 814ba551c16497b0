"""What the scheduler writes of a batch is what the host reads, and what it reads back is checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmsched.daemon.batch_slot import WANTED, Answers, BatchSlot
from shmsched.daemon.state import Step, Wanted
from shmsched.dataplane.layouts import HEADER, STEP, BatchSlotLayout, StepEntry, StepStatus
from shmsched.scheduling import SchedulerParams

LIMITS = SchedulerParams(8, 4)
VOCAB = 100
U32, U64 = 2**32 - 1, 2**64 - 1
STEPS = st.tuples(
    st.integers(0, U32), st.integers(1, 4), st.integers(0, U32), st.integers(0, 2), st.booleans(), st.integers(0, U64)
)


def step_of(slot: int, n_tokens: int, position: int, rows: int, sampled: bool, rows_offset: int) -> Step:
    session: Any = SimpleNamespace(slot=slot)
    n_rows = n_tokens if rows == 2 else rows
    entry = WANTED.pack(rows, sampled, b"s" * 20, 7, rows_offset)
    wanted = Wanted(entry, n_rows, n_rows if sampled else 0, sampled, sampled and n_rows == 1, 0.0, None)
    tokens = np.arange(n_tokens, dtype="<i4").tobytes()
    return Step(1, session, n_tokens, 1, tokens, position, wanted, 0.0)


@given(st.lists(STEPS, min_size=1, max_size=4))
def test_the_table_of_a_batch_has_an_entry_for_each_step(described: list[tuple[int, int, int, int, bool, int]]) -> None:
    layout = BatchSlotLayout(LIMITS.max_batch_size)
    memory = bytearray(layout.size)
    memory[layout.statuses_offset : layout.statuses_offset + 4] = b"\1" * 4
    lengths = BatchSlot(memoryview(memory), LIMITS, VOCAB).write(9, [step_of(*d) for d in described])
    assert lengths == [d[1] for d in described]
    assert HEADER.unpack_from(memory) == (9, len(described), sum(lengths))
    table = memory[layout.steps_offset :][: STEP.size * len(described)]
    start = 0
    for entry, (slot, n, position, rows, sampled, offset) in zip(STEP.iter_unpack(table), described, strict=True):
        assert StepEntry._make(entry) == (slot, start, n, position, rows, sampled, b"s" * 20, 7, offset)
        start += n
    tokens = np.frombuffer(memory, "<i4", start, layout.tokens_offset).tolist()
    assert tokens == [token for n in lengths for token in range(n)]
    assert memory[layout.statuses_offset :][: len(described)] == bytes(len(described))


@pytest.mark.parametrize("answers", [None, [1, 1]])
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
    answers: list[int] | None, statuses: tuple[int, int], ids: tuple[int, int], wrong: str | None
) -> None:
    layout = BatchSlotLayout(LIMITS.max_batch_size)
    memory = bytearray(layout.size)
    slot = BatchSlot(memoryview(memory), LIMITS, VOCAB)
    memory[layout.statuses_offset : layout.statuses_offset + 2] = bytes(statuses)
    np.frombuffer(memory, "<i4", 2, layout.ids_offset)[:] = ids
    np.frombuffer(memory, "<f4", 2, layout.logprobs_offset)[:] = (-0.5, -2.0)
    said = ["no"] * statuses.count(StepStatus.FAILED)
    if wrong is None:
        assert slot.read(2, answers, said) == (bytes(statuses), list(ids), [-0.5, -2.0], said)
        with pytest.raises(ValueError, match=f"{len(said) + 1} messages came for {len(said)} failed steps"):
            slot.read(2, answers, [*said, "no"])
    else:
        with pytest.raises(ValueError, match=wrong):
            slot.read(2, answers, said)


def test_of_some_of_the_steps_that_failed_each_keeps_its_message() -> None:
    answers = Answers(bytes([1, 3, 2, 3, 1]), [5, -1, -1, -1, 6], [0.5, 0.0, 0.0, 0.0, 1.5], ["one", "three"])
    assert answers.of([0, 2, 3, 4]) == (bytes([1, 2, 3, 1]), [5, -1, -1, 6], [0.5, 0.0, 0.0, 1.5], ["three"])
    assert answers.of([]) == (b"", [], [], [])


def test_what_follows_a_batch_goes_on_where_its_steps_end() -> None:
    layout = BatchSlotLayout(LIMITS.max_batch_size)
    memory = bytearray(layout.size)
    steps = [step_of(3, 4, 10, 1, True, 0), step_of(5, 1, 7, 1, True, 0)]
    BatchSlot(memoryview(memory), LIMITS, VOCAB).write_following(8, steps, [1, 4])
    assert HEADER.unpack_from(memory) == (8, 2, 2)
    entries = [StepEntry._make(e) for e in STEP.iter_unpack(memory[layout.steps_offset :][: STEP.size * 2])]
    assert [(e.slot, e.start, e.length, e.position, e.sampling) for e in entries] == [
        (3, 0, 1, 14, b"s" * 20),
        (5, 1, 1, 8, b"s" * 20),
    ]
    assert np.frombuffer(memory, "<u4", 2, layout.tokens_offset).tolist() == [1, 4]

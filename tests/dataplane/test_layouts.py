"""Both sides find every byte in the same place, and no cache line has two writers."""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmsched.dataplane.dtypes import LOGIT, RECORD_DTYPE, RESULT_DTYPE, STEP_DTYPE
from shmsched.dataplane.layouts import (
    CACHE_LINE,
    HEADER,
    RECORD,
    RESULT,
    SAMPLING,
    STEP,
    STREAMED,
    BatchSlotLayout,
    ClientLayout,
    Record,
    Result,
    StepEntry,
    aligned,
)


@pytest.mark.parametrize(
    ("packed", "dtype", "row"),
    [(RECORD, RECORD_DTYPE, Record), (RESULT, RESULT_DTYPE, Result), (STEP, STEP_DTYPE, StepEntry)],
    ids=["record", "result", "step"],
)
def test_struct_dtype_and_tuple_are_one_layout(packed: struct.Struct, dtype: npt.DTypeLike, row: type) -> None:
    dtype = np.dtype(dtype)
    assert packed.size == dtype.itemsize
    assert dtype.names == row._fields  # type: ignore[attr-defined]
    # A different value in each field: two that were swapped would show.
    values = tuple(
        bytes([i] * dtype[i].itemsize) if dtype[i].kind == "V" else i + 1
        for i in range(len(row._fields))  # type: ignore[attr-defined]
    )
    assert np.frombuffer(packed.pack(*values), dtype)[0].tolist() == values


def test_the_types_of_the_step_table_hold_what_a_frame_may_say() -> None:
    sampling = SAMPLING.pack(2**32 - 1, 1.5, 0.5, 2**64 - 1)
    most = StepEntry(*[2**32 - 1] * 4, 2**16 - 1, 2**16 - 1, sampling, *[2**64 - 1] * 2)
    assert StepEntry._make(np.frombuffer(STEP.pack(*most), STEP_DTYPE)[0].tolist()) == most


@given(st.integers(0, 2**40))
def test_aligned_is_the_next_cache_line(n: int) -> None:
    assert aligned(n) % CACHE_LINE == 0
    assert n <= aligned(n) < n + CACHE_LINE


def assert_apart(areas: list[tuple[int, int]], size: int) -> None:
    """Areas (offset, bytes) begin at cache lines, do not overlap, and end within ``size``."""
    assert all(offset % CACHE_LINE == 0 for offset, _ in areas)
    ends = [offset + n for offset, n in areas]
    assert all(end <= following for end, (following, _) in pairwise_of(ends, areas))
    assert ends[-1] <= size


def pairwise_of(ends: list[int], areas: list[tuple[int, int]]) -> list[tuple[int, tuple[int, int]]]:
    return [(ends[i], areas[j]) for i, j in pairwise(range(len(areas)))]


@given(st.integers(1, 2**24), st.integers(1, 2**20), st.integers(1, 2**20), st.integers(1, 2**20))
def test_client_segment(ring: int, records: int, results: int, stream: int) -> None:
    layout = ClientLayout(ring, records, results, stream)
    assert_apart(
        [
            (0, 4 * ring),
            (layout.records_offset, RECORD.size * records),
            (layout.results_offset, RESULT_DTYPE.itemsize * results),
            (layout.stream_offset, STREAMED.size * stream),
        ],
        layout.size,
    )


@given(st.integers(1, 2**20))
def test_batch_slot(n: int) -> None:
    layout = BatchSlotLayout(n)
    assert_apart(
        [
            (0, HEADER.size),
            (layout.steps_offset, STEP.size * n),
            (layout.tokens_offset, 4 * n),
            (layout.statuses_offset, n),
            (layout.ids_offset, 4 * n),
            (layout.logprobs_offset, 4 * n),
        ],
        layout.size,
    )
    # Slots lie one after the other.
    assert layout.size % CACHE_LINE == 0


def test_results_and_logits_are_little_endian_and_of_one_size_everywhere() -> None:
    assert RESULT_DTYPE.itemsize == 8
    assert [RESULT_DTYPE[name].str for name in ("token", "logprob")] == ["<i4", "<f4"]
    assert LOGIT.str == "<f4"

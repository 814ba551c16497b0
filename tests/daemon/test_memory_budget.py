"""The total of shared memory is bounded, whatever clients ask for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmsched.daemon.memory_budget import MemoryBudget
from shmsched.errors import SharedMemoryError


def test_what_is_over_the_limit_is_refused_with_the_sizes_and_takes_nothing() -> None:
    budget = MemoryBudget(10_000)
    budget.reserve(6_000, "the segment of client 1")
    with pytest.raises(
        SharedMemoryError, match=r"the arena of client 2 needs 4,001 bytes .*; 6,000 of the daemon's 10,000 are in use"
    ):
        budget.reserve(4_001, "the arena of client 2")
    assert budget.used == 6_000
    budget.reserve(4_000, "the arena of client 2")
    budget.release(6_000)
    budget.reserve(6_000, "the arena of client 3")


@given(st.lists(st.integers(0, 60), max_size=40))
def test_the_limit_holds_and_all_comes_back(sizes: list[int]) -> None:
    budget, held = MemoryBudget(100), []
    for n in sizes:
        try:
            budget.reserve(n, "a segment")
            held.append(n)
        except SharedMemoryError:
            assert sum(held) + n > 100
            if held:
                budget.release(held.pop(0))
        assert budget.used == sum(held) <= 100
    for n in held:
        budget.release(n)
    assert budget.used == 0

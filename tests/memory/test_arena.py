"""The arena's allocator against a plain map of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmsched.dataplane.layouts import CACHE_LINE
from shmsched.memory.arena import ArenaAllocator

SIZE = 40 * CACHE_LINE


class Arena(RuleBasedStateMachine):
    """The model: who has each byte. An odd end, since an arena's size is its client's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.size = SIZE - 7
        self.allocator = ArenaAllocator(self.size)
        self.held: dict[int, int] = {}
        self.taken = bytearray(self.size)

    def longest_extent(self) -> int:
        return max(map(len, bytes(self.taken).split(b"\1")))

    @rule(n=st.integers(1, SIZE))
    def allocate(self, n: int) -> None:
        fits = self.longest_extent() >= n
        offset = self.allocator.allocate(n)
        assert (offset is not None) == fits
        if offset is None:
            return
        assert offset % CACHE_LINE == 0
        assert offset + n <= self.size
        whole = min(-(-n // CACHE_LINE) * CACHE_LINE, self.size - offset)
        assert not any(self.taken[offset : offset + whole]), "overlaps what is held"
        self.taken[offset : offset + whole] = b"\1" * whole
        self.held[offset] = whole

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.held)))
        self.allocator.free(offset)
        n = self.held.pop(offset)
        self.taken[offset : offset + n] = bytes(n)
        with pytest.raises(KeyError):
            self.allocator.free(offset)

    @invariant()
    def counts_agree(self) -> None:
        assert self.allocator.held == len(self.held)
        assert self.allocator.free_bytes == self.taken.count(0)

    def teardown(self) -> None:
        for offset in self.held:
            self.allocator.free(offset)
        assert self.allocator.allocate(self.size) == 0, "freed neighbours did not join into one extent"


TestArena = Arena.TestCase


@given(st.lists(st.integers(1, 5 * CACHE_LINE), min_size=1, max_size=20), st.randoms())
def test_whatever_the_order_of_freeing_one_extent_remains(sizes: list[int], random: object) -> None:
    allocator = ArenaAllocator(100 * CACHE_LINE)
    offsets = [allocator.allocate(n) for n in sizes]
    random.shuffle(offsets)  # type: ignore[attr-defined]
    for offset in offsets:
        assert offset is not None
        allocator.free(offset)
    assert allocator.allocate(100 * CACHE_LINE) == 0


def test_an_empty_arena_holds_nothing() -> None:
    assert ArenaAllocator(0).allocate(1) is None

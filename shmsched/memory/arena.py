"""Allocating logits rows inside an arena. Pure bookkeeping: it never touches the memory."""

from __future__ import annotations

from bisect import bisect_left, insort

from shmsched.memory.layouts import aligned


class ArenaAllocator:
    """First fit over the free extents of ``size`` bytes, in cache lines. Freed neighbours join again at once.

    The number of extents is at most the number of allocations held plus one, so the cost of a call follows what one
    client holds, never what others do.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._starts = [0] if size else []
        self._ends = {0: size} if size else {}
        self._held: dict[int, int] = {}

    @property
    def held(self) -> int:
        """Allocations that were not freed yet."""
        return len(self._held)

    @property
    def free_bytes(self) -> int:
        return sum(self._ends[start] - start for start in self._starts)

    def allocate(self, n_bytes: int) -> int | None:
        """The offset of ``n_bytes`` (rounded up to cache lines), or None if no extent is long enough."""
        for i, start in enumerate(self._starts):
            end = self._ends[start]
            if end - start < n_bytes:
                continue
            # Extents begin at cache lines; only the arena's end may lie within one.
            n = min(aligned(n_bytes), end - start)
            del self._ends[start]
            if end - start == n:
                del self._starts[i]
            else:
                self._starts[i] = start + n
                self._ends[start + n] = end
            self._held[start] = start + n
            return start
        return None

    def free(self, offset: int) -> None:
        """Give back what ``allocate`` returned. Raises KeyError if it is not held."""
        start, end = offset, self._held.pop(offset)
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == end:
            end = self._ends.pop(self._starts.pop(i))
        if i > 0 and self._ends[self._starts[i - 1]] == start:
            start = self._starts.pop(i - 1)
        self._ends[start] = end
        insort(self._starts, start)

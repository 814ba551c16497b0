"""Whose turn it is to prefill."""

from __future__ import annotations

from shmsched.dataplane import marks
from shmsched.dataplane.step import Lane
from shmsched.not_copied import not_copied


class Rotation:
    """Lanes in turn, each offering a chunk of some size, and the first of them whose chunk fits some room.

    A tournament: place p is leaf ``half + p`` of a binary tree kept in a list, where an inner node holds the smallest
    size under it. So the first that fits is found, and a size changed, in O(log lanes), however many do not fit.
    Places are given out in increasing order. When they run out, the lanes close ranks: O(1) amortised.
    """

    __slots__ = ("at", "front", "half", "next", "sizes")
    __reduce__ = not_copied

    def __init__(self) -> None:
        self._lay_out([], [])

    def offer(self, lane: Lane, size: int) -> None:
        """The lane offers a chunk of this size, from the place it has or else from the back."""
        if lane.place < 0:
            self._join(lane)
        self._set(lane.place, size)

    def to_back(self, lane: Lane) -> None:
        """The lane goes to the back, and offers nothing yet."""
        self.leave(lane)
        self._join(lane)

    def leave(self, lane: Lane) -> None:
        """The lane gives up its place."""
        place = lane.place
        self._set(place, marks.NEVER)
        self.at[place] = None
        lane.place = -1

    def first_from(self, start: int, room: int) -> Lane | None:
        """The first lane, from the place ``start`` on, whose chunk fits the room."""
        sizes = self.sizes
        half = self.half
        if room >= marks.NEVER:
            room = marks.NEVER - 1
        if sizes[1] > room:
            return None
        while self.at[self.front] is None:  # nobody ever joins here again, so each place is stepped over once
            self.front += 1
        if start < self.front:
            start = self.front
        if start >= half:
            return None
        node = half + start
        while sizes[node] > room:
            while node & 1:  # a right child: whatever is further right hangs from an ancestor
                node >>= 1
            if node == 0:
                return None
            node += 1
        while node < half:
            node *= 2
            if sizes[node] > room:
                node += 1
        return self.at[node - half]

    def _join(self, lane: Lane) -> None:
        if self.next == self.half:
            present = [other for other in self.at if other is not None]
            self._lay_out(present, [self.sizes[self.half + other.place] for other in present])
        lane.place = self.next
        self.at[self.next] = lane
        self.next += 1

    def _set(self, place: int, size: int) -> None:
        sizes = self.sizes
        node = self.half + place
        sizes[node] = size
        node >>= 1
        while node > 0:
            smallest = sizes[2 * node]
            right = sizes[2 * node + 1]
            if right < smallest:
                smallest = right
            if sizes[node] == smallest:
                return
            sizes[node] = smallest
            node >>= 1

    def _lay_out(self, lanes: list[Lane], offers: list[int]) -> None:
        """Number the places anew. At least half are free then, so the next time is as many joins away as this cost."""
        n = len(lanes)
        half: int = marks.FEWEST_PLACES
        while half < 2 * n:
            half *= 2
        never: int = marks.NEVER
        sizes = [never] * half + offers + [never] * (half - n)
        for node in range(half - 1, 0, -1):
            sizes[node] = min(sizes[2 * node], sizes[2 * node + 1])
        for place in range(n):
            lanes[place].place = place
        at: list[Lane | None] = [None] * half
        at[:n] = lanes
        self.at = at
        self.sizes = sizes
        self.half = half
        self.front = 0
        self.next = n

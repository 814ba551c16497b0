"""Whose turn it is to prefill."""

from __future__ import annotations

from typing import Generic, TypeVar

NEVER = 2**63
"""The size that someone offers who has nothing to go now. It fits no room, and the place is kept."""

NOTHING = 0
"""The size that someone offers who has nothing to go, and leaves once a pass comes to it. It fits any room."""

_FEWEST_PLACES = 16


class InTurn:
    """What has a place in a rotation, or -1 if it has none at the moment. The rotation alone writes it."""

    __slots__ = ("place",)

    def __init__(self) -> None:
        self.place = -1


M = TypeVar("M", bound=InTurn)


class Rotation(Generic[M]):
    """Members in turn, each offering a chunk of some size, and the first of them whose chunk fits some room.

    A tournament: place p is leaf ``_half + p`` of a binary tree kept in a list, where an inner node holds the smallest
    size under it. So the first that fits is found, and a size changed, in O(log members), however many do not fit.
    Places are given out in increasing order. When they run out, the members close ranks: O(1) amortised.
    """

    __slots__ = ("_at", "_front", "_half", "_next", "_size")

    def __init__(self) -> None:
        self._lay_out([], [])

    def offer(self, member: M, size: int) -> None:
        """The member offers a chunk of this size, from the place it has or else from the back."""
        self._set(member.place if member.place >= 0 else self._join(member), size)

    def to_back(self, member: M) -> None:
        """The member goes to the back, and offers nothing yet."""
        self.leave(member)
        self._join(member)

    def leave(self, member: M) -> None:
        """The member gives up its place."""
        place = member.place
        self._set(place, NEVER)
        self._at[place] = None
        member.place = -1

    def first(self, room: int, start: int = 0) -> M | None:
        """The first member, from the place ``start`` on, whose chunk fits the room."""
        sizes, half, at = self._size, self._half, self._at
        if sizes[1] > room:
            return None
        while at[self._front] is None:  # nobody ever joins here again, so each place is stepped over once
            self._front += 1
        start = max(start, self._front)
        if start >= half:
            return None
        node = half + start
        while sizes[node] > room:
            while node & 1:  # a right child: whatever is further right hangs from an ancestor
                node >>= 1
            if not node:
                return None
            node += 1
        while node < half:
            node *= 2
            if sizes[node] > room:
                node += 1
        return at[node - half]

    def _join(self, member: M) -> int:
        if self._next == self._half:
            present = [member for member in self._at if member is not None]
            self._lay_out(present, [self._size[self._half + member.place] for member in present])
        place = member.place = self._next
        self._at[place] = member
        self._next += 1
        return place

    def _set(self, place: int, size: int) -> None:
        sizes = self._size
        node = self._half + place
        sizes[node] = size
        while node := node >> 1:
            smallest, right = sizes[2 * node], sizes[2 * node + 1]
            if right < smallest:
                smallest = right
            if sizes[node] == smallest:
                return
            sizes[node] = smallest

    def _lay_out(self, members: list[M], offers: list[int]) -> None:
        """Number the places anew. At least half are free then, so the next time is as many joins away as this cost."""
        half = _FEWEST_PLACES
        while half < 2 * len(members):
            half *= 2
        free = half - len(members)
        sizes = [NEVER] * half + offers + [NEVER] * free
        for node in range(half - 1, 0, -1):
            sizes[node] = min(sizes[2 * node], sizes[2 * node + 1])
        for place, member in enumerate(members):
            member.place = place
        self._at: list[M | None] = [*members, *[None] * free]
        self._size, self._half = sizes, half
        self._front, self._next = 0, len(members)

"""The rings against plain lists: any sequence of writes and reads, round the end and back."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shmsched.dataplane.rings import RecordReader, RecordRing, TokenReader, TokenWriter

CAPACITY = 13
ROW = struct.Struct("<QI")
INT32 = st.integers(-(2**31), 2**31 - 1)


def packed(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


class TokenRing(RuleBasedStateMachine):
    """The model: the tokens on their way, and how many the reader has taken that the writer does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = bytearray(4 * CAPACITY)
        self.writer = TokenWriter(memoryview(self.memory))
        self.reader = TokenReader(memoryview(self.memory))
        self.unread: list[int] = []
        self.untold = 0

    @rule(tokens=st.lists(INT32, max_size=CAPACITY + 2))
    def write(self, tokens: list[int]) -> None:
        room = CAPACITY - len(self.unread) - self.untold
        if len(tokens) > room:
            before = bytes(self.memory)
            with pytest.raises(ValueError, match=f"{len(tokens)} tokens into {room} free cells"):
                self.writer.put(packed(tokens))
            assert bytes(self.memory) == before
        else:
            self.writer.written = self.writer.put(packed(tokens))
            self.unread += tokens

    @rule(tokens=st.lists(INT32, max_size=CAPACITY))
    def put_and_think_better_of_it(self, tokens: list[int]) -> None:
        room = CAPACITY - len(self.unread) - self.untold
        self.writer.put(packed(tokens[:room]))

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, len(self.unread)))
        taken = self.reader.take(n)
        assert np.frombuffer(taken, "<i4").tolist() == self.unread[:n]
        del self.unread[:n]
        self.untold += n

    @rule()
    def tell(self) -> None:
        self.writer.returned(self.reader.read)
        self.untold = 0

    @rule(beyond=st.integers(1, 2**63))
    def tell_of_tokens_never_written(self, beyond: int) -> None:
        with pytest.raises(ValueError, match="the token ring was read up to"):
            self.writer.returned(self.writer.written + beyond)

    @rule(before=st.integers(1, 2**63))
    def take_it_back(self, before: int) -> None:
        with pytest.raises(ValueError, match="the token ring was read up to"):
            self.writer.returned(self.writer.read - before)

    @invariant()
    def room_agrees(self) -> None:
        assert self.writer.room == CAPACITY - len(self.unread) - self.untold


TestTokenRing = TokenRing.TestCase


class Records(RuleBasedStateMachine):
    """The model: a list of what was written and not read. Room is its user's to reserve, so no more is written than fits."""

    def __init__(self) -> None:
        super().__init__()
        memory = memoryview(bytearray(ROW.size * CAPACITY))
        self.ring = RecordRing(memory, ROW)
        self.reader = RecordReader(memory, ROW.size)
        self.unread: list[tuple[int, int]] = []
        self.published = 0

    rows = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))

    @rule(row=rows)
    def append(self, row: tuple[int, int]) -> None:
        if len(self.unread) < CAPACITY:
            self.ring.append(*row)
            self.unread.append(row)

    @rule(rows=st.lists(rows, max_size=CAPACITY))
    def extend(self, rows: list[tuple[int, int]]) -> None:
        rows = rows[: CAPACITY - len(self.unread)]
        self.ring.append_packed([ROW.pack(*row) for row in rows])
        self.unread += rows

    @rule()
    def publish(self) -> None:
        self.ring.publish()
        self.published = len(self.unread)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, self.published))
        taken = self.reader.take_until(self.reader.read + n)
        assert list(ROW.iter_unpack(taken)) == self.unread[:n]
        del self.unread[:n]
        self.published -= n

    @rule(n=st.one_of(st.integers(-(2**63), -1), st.integers(CAPACITY + 1, 2**64)))
    def take_what_cannot_be(self, n: int) -> None:
        read = self.reader.read
        with pytest.raises(ValueError, match=f"a ring of {CAPACITY} rows"):
            self.reader.take_until(read + n)
        assert self.reader.read == read


TestRecords = Records.TestCase


def test_what_was_taken_cannot_be_changed_by_the_writer() -> None:
    memory = bytearray(16)
    TokenWriter(memoryview(memory)).put(packed([1, 2, 3]))
    taken = TokenReader(memoryview(memory)).take(3)
    memory[:] = b"\xff" * 16
    assert np.frombuffer(taken, "<i4").tolist() == [1, 2, 3]

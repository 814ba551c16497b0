"""Cutting a stream into payloads, however it arrives."""

from __future__ import annotations

import multiprocessing
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmsched.errors import ProtocolError
from shmsched.wire.framing import MAX_FRAME, FrameSplitter, framed

PAYLOADS = st.lists(st.binary(min_size=1, max_size=60), max_size=8)


@given(PAYLOADS, st.data())
def test_any_split_of_a_stream_gives_the_same_payloads(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(framed, payloads))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    splitter, found = FrameSplitter(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += splitter.feed(stream[start:stop])
    assert found == payloads


@given(PAYLOADS)
def test_byte_by_byte(payloads: list[bytes]) -> None:
    splitter = FrameSplitter()
    stream = b"".join(map(framed, payloads))
    assert [p for i in range(len(stream)) for p in splitter.feed(stream[i : i + 1])] == payloads


@pytest.mark.parametrize("length", [0, -1, -(2**31), 11, 2**31 - 1])
@pytest.mark.parametrize("before", [b"", framed(b"fine")], ids=["first", "later"])
def test_a_length_that_no_frame_has_is_refused_as_soon_as_it_is_read(length: int, before: bytes) -> None:
    splitter = FrameSplitter(max_frame=10)
    head = before + struct.pack("!i", length)
    splitter.feed(head[:-1])
    with pytest.raises(ProtocolError, match=f"a frame of {length} bytes; at most 10"):
        splitter.feed(head[-1:])


def test_the_longest_frame_is_taken() -> None:
    payload = bytes(MAX_FRAME)
    assert FrameSplitter().feed(framed(payload)) == [payload]


class Counted(bytearray):
    """Counts the bytes that are copied into it and out of it."""

    copied = 0

    def __iadd__(self, more: bytes) -> Counted:  # type: ignore[override,misc]
        self.copied += len(more)
        self.extend(more)
        return self

    def __bytes__(self) -> bytes:
        self.copied += len(self)
        return bytes(memoryview(self))


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_a_trickled_frame_costs_work_in_proportion_to_its_length(piece: int) -> None:
    stream = framed(bytes(100_000))
    splitter = FrameSplitter()
    pending = splitter._pending = Counted()
    found = [p for i in range(0, len(stream), piece) for p in splitter.feed(stream[i : i + piece])]
    assert found == [bytes(100_000)]
    assert pending.copied <= 3 * len(stream)


@pytest.mark.parametrize("n", [1, 100, 16384, 16385, 300_000])
def test_a_plain_connection_speaks_it(n: int) -> None:
    here, there = multiprocessing.Pipe()
    with here, there:
        payload = os.urandom(n)
        writer = multiprocessing.get_context("fork").Process(target=here.send_bytes, args=(payload,))
        writer.start()
        splitter, found = FrameSplitter(), []
        while not found:
            assert there.poll(10), "nothing came for 10 s"
            found = splitter.feed(os.read(there.fileno(), 1 << 16))
        assert found == [payload]
        writer.join(10)
        assert writer.exitcode == 0


@pytest.mark.parametrize("n", [1, 100, 16384, 30_000])
def test_a_plain_connection_understands_it(n: int) -> None:
    here, there = multiprocessing.Pipe()
    with here, there:
        payload = os.urandom(n)
        assert os.write(here.fileno(), framed(payload)) == n + 4
        assert there.poll(10)
        assert there.recv_bytes() == payload

"""What a reader of a stream must hold to, whatever the bytes."""

from __future__ import annotations

from typing import Any

from shmsched.errors import ProtocolError
from shmsched.wire.codec import pack, unpack
from shmsched.wire.framing import FrameSplitter


def read_stream(data: bytes) -> list[Any]:
    """The frames in the bytes after the first, which says in what pieces they arrive.

    Raises AssertionError if the pieces make a difference, or if a frame that was read is not the frame that it is written as.
    (What came in one piece with the end of the stream's sense is lost with it: the connection ends there.)
    """
    if not data:
        return []
    piece, stream = data[0] + 1, data[1:]
    whole, error = _read([stream])
    pieces = [stream[i : i + piece] for i in range(0, len(stream), piece)]
    in_pieces, error_in_pieces = _read(pieces)
    assert bool(error) == bool(error_in_pieces)
    assert repr(whole) == repr(in_pieces[: len(whole)])
    assert error or len(whole) == len(in_pieces)
    for message in whole:
        again = unpack(pack(message))
        # By their words: a NaN is no equal of itself.
        assert repr(again) == repr(message)
    return whole


def _read(pieces: list[bytes]) -> tuple[list[Any], str]:
    splitter = FrameSplitter(max_frame=4096)
    messages: list[Any] = []
    try:
        for piece in pieces:
            messages += [unpack(payload) for payload in splitter.feed(piece)]
    except ProtocolError as e:
        return messages, str(e)
    return messages, ""

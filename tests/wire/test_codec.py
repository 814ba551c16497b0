"""Frames become bytes and come back; whatever else arrives is a ProtocolError and nothing worse."""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shmsched.dataplane.descriptors import pack_submit
from shmsched.errors import ProtocolError
from shmsched.wire import codec, frames
from shmsched.wire.codec import U8, U32, Text, frame, pack, pack_framed, unpack, unpack_declared
from shmsched.wire.engine_frames import pack_done
from shmsched.wire.framing import MAX_FRAME, framed

SCALARS = {
    "B": st.integers(0, 2**8 - 1),
    "H": st.integers(0, 2**16 - 1),
    "I": st.integers(0, 2**32 - 1),
    "Q": st.integers(0, 2**64 - 1),
    "f": st.floats(width=32, allow_nan=False),
    "d": st.floats(allow_nan=False),
    "20s": st.binary(min_size=20, max_size=20),
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
STEPS = st.builds(
    frames.StepDescriptor,
    *[SCALARS[code] for code in re.findall(r"\d*\D", frames.STEP_DESCRIPTOR.format.removeprefix("<"))],
)
PARTS = [
    (codec.Text, TEXT),
    (codec.Texts, st.lists(TEXT, max_size=4).map(tuple)),
    (codec.Blob, st.binary(max_size=40)),
    (codec.U32s, st.lists(SCALARS["I"], max_size=5).map(tuple)),
    (codec.U64s, st.lists(SCALARS["Q"], max_size=5).map(tuple)),
    (frames.StepDescriptors, st.lists(STEPS, max_size=4)),
]
KINDS = sorted(codec._by_type, key=lambda cls: codec._by_type[cls].kind)


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    if isinstance(annotation.__metadata__[0], str):
        return SCALARS[annotation.__metadata__[0]]
    return next(strategy for part, strategy in PARTS if part == annotation)


def messages(cls: type) -> st.SearchStrategy[Any]:
    return st.builds(
        cls, *map(values_of, get_type_hints(cls, vars(sys.modules[cls.__module__]), include_extras=True).values())
    )


ANY = st.one_of(*[messages(cls) for cls in KINDS])


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_every_kind_comes_back_as_it_went(cls: type) -> None:
    @given(messages(cls))
    def check(message: Any) -> None:
        again = unpack(pack(message))
        assert type(again) is cls
        assert again == message

    check()


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_bytes_of_a_newer_minor_version_are_ignored(cls: type) -> None:
    @given(messages(cls), st.binary(min_size=1, max_size=20))
    def check(message: Any, more: bytes) -> None:
        assert unpack(pack(message) + more) == message

    check()


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_a_frame_cut_anywhere_is_a_protocol_error(cls: type) -> None:
    @given(messages(cls))
    def check(message: Any) -> None:
        payload = pack(message)
        for n in range(len(payload)):
            with pytest.raises(ProtocolError):
                unpack(payload[:n])

    check()


@given(st.binary(max_size=200))
def test_random_bytes(payload: bytes) -> None:
    try:
        assert type(unpack(payload)) in codec._by_type
    except ProtocolError:
        pass


@given(ANY, st.data())
def test_a_frame_with_damaged_bytes(message: Any, data: st.DataObject) -> None:
    payload = bytearray(pack(message))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(2, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert type(unpack(payload)) is type(message)
    except ProtocolError:
        pass


@given(st.sampled_from(KINDS), st.binary(max_size=200))
def test_random_bytes_of_a_known_kind(cls: type, body: bytes) -> None:
    kind = codec._by_type[cls].kind
    try:
        assert type(unpack(kind.to_bytes(2, "little") + b"\0\0" + body)) is cls
    except ProtocolError:
        pass


@given(st.integers(0, 2**16 - 1))
def test_an_unknown_kind_is_named(kind: int) -> None:
    assume(kind not in codec._by_kind)
    with pytest.raises(ProtocolError, match=f"unknown kind {kind}"):
        unpack(kind.to_bytes(2, "little") + bytes(50))


@given(ANY)
def test_a_frame_packed_with_its_length_in_front(message: Any) -> None:
    assert pack_framed(message) == framed(pack(message))


@given(st.lists(STEPS, max_size=4))
def test_steps_that_were_read_are_those_that_were_written(steps: list[frames.StepDescriptor]) -> None:
    rows = unpack(pack(frames.Submit(1, 2, 3, 4, steps))).steps
    assert len(rows) == len(steps)
    assert list(rows) == steps
    assert rows == steps
    assert [rows[i] for i in range(len(steps))] == steps
    assert rows == unpack(pack(frames.Submit(5, 6, 7, 8, rows, (9,)))).steps
    brief = [(*row[:4], *frames.WANTED.unpack(row[4])) for row in rows.briefly()]
    assert brief == steps


def outcome(unpacked: Callable[[bytes], Any], payload: bytes) -> tuple[str, str]:
    """The frame or the error, in words: a NaN is the same as a NaN then."""
    try:
        frame = unpacked(payload)
    except ProtocolError as e:
        return "error", str(e)
    return type(frame).__name__, repr(frame)


@pytest.mark.parametrize("kind", sorted(codec._shortcuts))
def test_a_shortcut_gives_what_the_declaration_gives(kind: int) -> None:
    """For whole frames, for damaged ones and for any bytes of the kind; and some frames of the kind do take it."""
    cls = codec._by_kind[kind].make
    taken = 0

    @settings(max_examples=300)
    @given(messages(cls), st.data())
    def check(message: Any, data: st.DataObject) -> None:
        nonlocal taken
        payload = bytearray(pack(message))
        assert outcome(unpack, bytes(payload)) == outcome(unpack_declared, bytes(payload))
        taken += codec._shortcuts[kind](bytes(payload)) is not None
        for _ in range(data.draw(st.integers(0, 4))):
            payload[data.draw(st.integers(2, len(payload) - 1))] = data.draw(st.integers(0, 255))
        damaged = bytes(payload[: data.draw(st.integers(2, len(payload)))]) + data.draw(st.binary(max_size=70))
        assert outcome(unpack, damaged) == outcome(unpack_declared, damaged)

    check()
    assert taken


@given(st.sampled_from(sorted(codec._shortcuts)), st.binary(max_size=200))
def test_a_shortcut_takes_no_bytes_that_are_no_frame(kind: int, body: bytes) -> None:
    payload = kind.to_bytes(2, "little") + body
    assert outcome(unpack, payload) == outcome(unpack_declared, payload)


ONE_STEP = frames.STEP_DESCRIPTOR.size


@given(st.binary(min_size=ONE_STEP, max_size=ONE_STEP), st.integers(0, 2), st.integers(0, 2))
def test_a_frame_of_the_length_of_one_step(step: bytes, n_steps: int, n_stop_tokens: int) -> None:
    head = struct.pack("<HHQQQQI", 34, 0, 1, 2, 3, 4, n_steps)
    payload = head + step + n_stop_tokens.to_bytes(4, "little")
    assert outcome(unpack, payload) == outcome(unpack_declared, payload)


def test_no_two_frames_share_a_number() -> None:
    class Another(NamedTuple):
        value: U8

    taken = codec._by_type[frames.Hello].kind
    with pytest.raises(TypeError, match=f"kind {taken} is used once"):
        frame(taken)(Another)
    assert len(codec._by_kind) == len(codec._by_type) == len(KINDS)


def test_scalars_come_first() -> None:
    class Mixed(NamedTuple):
        text: Text
        number: U32

    with pytest.raises(TypeError, match="scalars come before parts"):
        frame(60000)(Mixed)


@given(
    st.tuples(*[SCALARS["Q"]] * 4),
    st.lists(STEPS, max_size=4),
    st.lists(SCALARS["I"], max_size=5).map(tuple),
)
def test_a_submission_is_packed_as_any_other_frame(
    cursors: tuple[int, int, int, int], steps: list[frames.StepDescriptor], stop_tokens: tuple[int, ...]
) -> None:
    packed = b"".join([frames.STEP_DESCRIPTOR.pack(*step) for step in steps])
    assert pack_submit(*cursors, packed, stop_tokens) == framed(pack(frames.Submit(*cursors, steps, stop_tokens)))


@given(SCALARS["Q"])
def test_a_done_is_packed_as_any_other_frame(batch: int) -> None:
    for messages in ((), ("it is full",)):
        assert pack_done(batch, messages) == framed(pack(frames.Done(batch, messages)))


def test_numbers_of_the_protocol_stay() -> None:
    """They are what older peers know. A new frame gets a new number; none is changed or used again."""
    assert {codec._by_type[cls].kind: cls.__name__ for cls in KINDS} == {
        1: "Hello", 2: "Refused", 3: "Stopping",
        16: "Welcome", 17: "Model", 18: "SessionOpened", 19: "SessionRefused", 20: "SessionEnded", 21: "Completions",
        22: "Failed", 23: "Returned", 24: "Arena", 25: "ArenaRefused",
        32: "OpenSession", 33: "CloseSession", 34: "Submit", 35: "Cancel", 36: "OpenArena", 37: "Consumed",
            38: "Halt", 39: "ForkSession",
        48: "Offer", 49: "Ready", 50: "StartFailed", 51: "SlotRefused", 52: "SlotOpened", 53: "Done", 54: "BatchFailed",
            55: "Faulty", 56: "Skipped",
        64: "Attached", 65: "OpenSlot", 66: "CloseSlot", 67: "AttachArena", 68: "DetachArena", 69: "Work",
            70: "ForkSlot", 71: "Follow",
        80: "AskStatus", 81: "Status", 82: "Stop",
    }  # fmt: skip


# --- texts come from anywhere: an engine's exception among them -----------------------------------------------------------


@pytest.mark.parametrize("n", range(65530, 65540))
def test_a_text_too_long_is_cut_between_characters(n: int) -> None:
    message = frames.StartFailed("x" * n + "äöü€")
    (text,) = unpack(pack(message))
    assert message.message.startswith(text)
    assert len(text.encode()) > 65531 or n < 65532


def test_half_a_surrogate_does_not_stop_a_frame() -> None:
    assert unpack(pack(frames.StartFailed("bad \ud800 file"))) == frames.StartFailed("bad ? file")


def test_text_that_is_not_utf8_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="not UTF-8"):
        unpack(pack(frames.StartFailed("abc")).replace(b"abc", b"a\xff\xfe"))


@pytest.mark.parametrize("n", [1, 100, 5000])
def test_many_long_messages_still_make_a_frame_that_is_taken(n: int) -> None:
    payload = pack(frames.Done(1, ("€" * 30000,) * n))
    assert len(payload) <= MAX_FRAME
    messages = unpack(payload).messages
    assert len(messages) == n
    assert all(messages)
    assert set("".join(messages)) == {"€"}

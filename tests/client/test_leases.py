"""Leases of logits rows: they last as long as anything refers to them, and no longer (F14)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from shmsched.client.leases import ClientArena
from shmsched.dataplane.layouts import GUARD
from shmsched.errors import Full, InvalidRequest
from shmsched.memory.segment import Segment
from shmsched.steps import LogitsBlock

VOCAB = 16
ROW = VOCAB * 4
"""One row is one cache line, so that sizes are exact. The arena has room for four rows apart, or for ten side by side."""


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(4 * (ROW + 2 * GUARD), "a test's arena")
    yield segment
    segment.close_descriptor()


@pytest.fixture
def arena(segment: Segment) -> ClientArena:
    return ClientArena(segment)


def completed(arena: ClientArena, segment: Segment, rows: int, value: float) -> LogitsBlock:
    """A step whose engine wrote ``value`` into all its rows."""
    offset = arena.reserve(rows, VOCAB)
    np.frombuffer(segment.buffer, np.float32, rows * VOCAB, offset)[:] = value
    return arena.lease(offset, rows, VOCAB)


def is_full(arena: ClientArena, rows: int = 1) -> bool:
    try:
        arena.free(arena.reserve(rows, VOCAB))
    except Full:
        return True
    return False


def test_logits_are_read_in_place_and_cannot_be_written(arena: ClientArena, segment: Segment) -> None:
    data = completed(arena, segment, 2, 1.5).data
    assert (data.dtype, data.shape) == (np.float32, (2, VOCAB))
    assert (data == 1.5).all()
    segment.buffer[GUARD : GUARD + 4] = np.float32(7).tobytes()
    assert data[0, 0] == 7, "a copy"
    with pytest.raises(ValueError, match="read-only"):
        data[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        data.flags.writeable = True


KEEPERS: list[Callable[[LogitsBlock], object]] = [
    lambda block: block,
    lambda block: block.data,
    lambda block: block.data[0],
    lambda block: block.data[1:, 3:5],
    lambda block: block.data.reshape(-1)[5:6],
    lambda block: block.data.T[::2],
    lambda block: block.data.view(np.int32)[0],
    lambda block: memoryview(block.data),
    lambda block: np.asarray(block.data, copy=False)[None],
    lambda block: np.lib.stride_tricks.as_strided(block.data, (2, 2)),
]


@pytest.mark.parametrize("keep", KEEPERS)
def test_whatever_was_made_from_the_array_keeps_its_rows(
    arena: ClientArena, segment: Segment, keep: Callable[[LogitsBlock], object]
) -> None:
    kept = keep(completed(arena, segment, 10, 1.0))
    gc.collect()
    assert arena.leased == 1
    assert is_full(arena), "the rows go to another step under what was made from them"
    if not isinstance(kept, LogitsBlock):
        values = np.asarray(kept).view(np.float32)
        assert (values == 1.0).all()
        del values
    del kept
    gc.collect()
    assert arena.leased == 0
    assert not is_full(arena, 10)


def test_what_was_computed_from_it_keeps_nothing(arena: ClientArena, segment: Segment) -> None:
    block = completed(arena, segment, 10, 1.0)
    computed = (block.copy(), block.data * 2, block.data.argmax(axis=1), float(block.data[0, 0]))
    del block
    gc.collect()
    assert not is_full(arena, 10)
    assert (computed[0] == 1.0).all()


def test_release_gives_the_rows_back_early_and_once(arena: ClientArena, segment: Segment) -> None:
    block = completed(arena, segment, 10, 1.0)
    data = block.data
    block.release()
    with pytest.raises(ValueError, match=r"released; read \.data before release"):
        _ = block.data
    with pytest.raises(ValueError, match="released"):
        block.copy()
    assert "released" in repr(block)
    offset = arena.reserve(10, VOCAB)
    # Neither a second release nor the end of the array gives back what is another step's now.
    block.release()
    del data, block
    gc.collect()
    assert arena.leased == 0
    assert is_full(arena)
    arena.free(offset)


def test_a_copy_outlives_the_release(arena: ClientArena, segment: Segment) -> None:
    block = completed(arena, segment, 2, 3.0)
    copy = block.copy()
    block.release()
    completed(arena, segment, 10, 9.0)
    assert (copy == 3.0).all()
    copy[0, 0] = 1.0


def test_a_full_arena_says_who_holds_it(arena: ClientArena, segment: Segment) -> None:
    held = [completed(arena, segment, 1, float(i)) for i in range(3)]
    arena.reserve(1, VOCAB)
    with pytest.raises(Full, match=r"no room for 1 row of 16 logits \(192 bytes\) in the arena of 768 bytes") as e:
        arena.reserve(1, VOCAB)
    assert "3 leases are held and 1 step is outstanding" in str(e.value)
    assert "arena_bytes" in str(e.value)
    held.pop()
    assert not is_full(arena)
    assert [block.data[0, 0] for block in held] == [0.0, 1.0]


def test_what_can_never_fit_is_refused_with_the_sizes(arena: ClientArena) -> None:
    with pytest.raises(InvalidRequest, match="11 rows of 16 logits and their guards take 832 bytes; the arena has 768"):
        arena.reserve(11, VOCAB)
    assert not is_full(arena, 10)


def test_what_just_fits_an_arena_of_an_odd_size_fits() -> None:
    segment = Segment.create(228, "a test's arena")
    arena = ClientArena(segment)
    offset = arena.reserve(1, 25)
    arena.free(offset)
    with pytest.raises(InvalidRequest, match="232 bytes; the arena has 228"):
        arena.reserve(1, 26)
    segment.close_descriptor()


def test_rows_of_a_step_that_ended_without_an_answer_come_back(arena: ClientArena) -> None:
    offset = arena.reserve(10, VOCAB)
    assert is_full(arena)
    arena.free(offset)
    assert not is_full(arena, 10)


def test_a_finalizer_takes_no_lock(arena: ClientArena, segment: Segment) -> None:
    """Garbage is collected anywhere: in the thread that holds the client's lock too."""
    lock = threading.Lock()
    blocks = [completed(arena, segment, 1, 0.0) for _ in range(4)]
    with lock:
        blocks.clear()
        gc.collect()
        assert arena.leased == 0
        assert not is_full(arena, 10)


def test_collections_in_the_middle_of_reserving(segment: Segment) -> None:
    """Blocks that are reachable from nothing but themselves end whenever the collector runs: with every allocation here."""
    arena = ClientArena(segment)
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for i in range(300):
            cycle: list[object] = []
            try:
                block = completed(arena, segment, 1 + i % 3, float(i))
            except Full:
                continue
            assert (block.data == i).all()
            cycle += [cycle, block.data[0]]
            del block
    finally:
        gc.set_threshold(*before)
    del cycle
    gc.collect()
    assert arena.leased == 0
    assert not is_full(arena, 10)


def test_finalizers_of_many_threads(segment: Segment) -> None:
    arena, lock = ClientArena(segment), threading.Lock()
    errors: list[BaseException] = []

    def work(value: float) -> None:
        try:
            for _ in range(200):
                with lock:
                    try:
                        block = completed(arena, segment, 1, value)
                    except Full:
                        continue
                array = block.data[0, 4:]
                del block
                assert (array == value).all()
                del array
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert arena.leased == 0
    assert not is_full(arena, 10)


def test_logits_outlive_the_arena(segment: Segment) -> None:
    arena = ClientArena(segment)
    data = completed(arena, segment, 2, 4.0).data[1]
    del arena
    gc.collect()
    assert (data == 4.0).all()


def own(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.float32]:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (own((2, 3), np.float64), r"float64 \(2, 3\); a float32 array"),
        (own((3,), np.float32), r"float32 \(3,\)"),
        (own((1, 2, 3), np.float32), r"\(1, 2, 3\)"),
        ([[1.0]], "no dtype list"),
        (None, "no dtype NoneType"),
    ],
)
def test_logits_blocks_are_float32_matrices(data: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        LogitsBlock(data)  # type: ignore[arg-type]


def test_a_block_around_one_s_own_array_leaves_it_writable() -> None:
    array = own((2, 3), np.float32)
    block = LogitsBlock(array)
    array[0, 0] = 1
    assert block.data[0, 0] == 1
    with pytest.raises(ValueError, match="read-only"):
        block.data[0, 0] = 2
    assert repr(block) == "LogitsBlock((2, 3))"

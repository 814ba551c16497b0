"""The parts of the stress tool that its verdict rests on."""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import random

import numpy as np
import pytest

from shmsched.memory.segment import Segment
from shmsched.tools.load.choices import Generations, Turns
from shmsched.tools.load.lies import lie
from shmsched.tools.load.mirror import Mirror, hashes_after
from shmsched.tools.load.options import Mode
from shmsched.tools.load.rows import HeldLeases, RowCheck
from shmsched.tools.load.tally import Latencies, Tally
from shmsched.tools.load.trend import (
    DESCRIPTORS,
    MEMORY,
    MOST_SAMPLES,
    SAMPLE_S,
    SHARED_MEMORY,
    Series,
    Watch,
    held_by,
)
from shmsched.wire.codec import pack, unpack
from shmsched.workers.echo import PEAK, advance, answer

VOCAB = 1000


def echo_rows(answers: list[int]) -> np.ndarray:
    rows = np.tile(((np.arange(VOCAB, dtype=np.int64) * 40503) & 0xFFFF).astype(np.float32), (len(answers), 1))
    rows[np.arange(len(answers)), answers] = PEAK
    return rows


def read_only(rows: np.ndarray) -> np.ndarray:
    view = rows.view()
    view.flags.writeable = False
    return view


@pytest.mark.parametrize("start", [0, 1, 2**64 - 1, 0x9E3779B97F4A7C15])
def test_the_running_sum_is_the_rolling_hash(start: int) -> None:
    tokens = np.random.default_rng(1).integers(0, 2**31, 3000, np.int32)
    expected = list(itertools.accumulate(tokens.tolist(), lambda h, t: advance(h, [t]), initial=start))[1:]
    assert hashes_after(start, tokens).tolist() == expected


def test_a_mirror_follows_rewinds() -> None:
    mirror = Mirror(VOCAB)
    for position, tokens in [(0, [5, 6, 7]), (3, [8]), (1, [9, 10]), (3, [11])]:
        mirror.feed(position, np.array(tokens, np.int32))
    assert len(mirror) == 4
    history = [5, 9, 10, 11]
    assert mirror.answers(4, np.array([12, 13], np.int32)).tolist() == [
        answer(advance(0, [*history, 12]), VOCAB),
        answer(advance(0, [*history, 12, 13]), VOCAB),
    ]
    assert len(mirror) == 4
    first = answer(advance(0, history), VOCAB)
    second = answer(advance(0, [*history, first]), VOCAB)
    assert mirror.continuation(4, np.empty(0, np.int32), 2) == [first, second]
    assert mirror.continuation(4, np.array([first], np.int32), 1) == [second]


def test_rows_are_compared_at_the_peak_and_if_asked_everywhere() -> None:
    check = RowCheck(VOCAB)
    answers = np.array([3, 999], np.int64)
    rows = echo_rows([3, 999])
    assert check.fault(read_only(rows), answers, whole=True) is None
    assert check.fault(rows, answers, whole=False) == "rows are writable"
    assert "not float32" in str(check.fault(read_only(rows[:1]), answers, whole=False))
    assert "not 131072.0 at 998" in str(check.fault(read_only(rows), np.array([3, 998]), whole=False))
    rows[1, 40] += 1
    assert check.fault(read_only(rows), answers, whole=False) is None
    assert "row 1 differs from the pattern at [40, 999]" in str(check.fault(read_only(rows), answers, whole=True))


def test_rows_that_change_while_they_are_held_are_found() -> None:
    held = HeldLeases(RowCheck(VOCAB))
    rows = echo_rows([3])
    assert held.hold(read_only(rows), np.array([3], np.int64), 3)
    assert held.check_due() == []
    rows[0, 17] = 0.5
    assert held.check_due() == []
    (fault,) = held.check_due()
    assert "changed while they were held" in fault
    assert len(held) == 0


def test_latencies_keep_one_percent_and_the_greatest() -> None:
    one, other = Tally(), Tally()
    values = np.random.default_rng(2).lognormal(8, 2, 20_000)
    for i, value in enumerate(values.tolist()):
        (one if i % 3 else other).took(value / 1e6)
    one.merge(other)
    for q in (50, 90, 99):
        assert one.latencies.percentile(q) == pytest.approx(np.percentile(values, q), rel=0.02)
    assert one.longest_us == pytest.approx(values.max())
    assert Latencies().percentile(50) == 0.0


def test_tallies_travel_and_add_up() -> None:
    one, other = Tally(sent=3, wrong=1), Tally(sent=4, rewinds=2)
    other.say_failed(ValueError("no"), 2, "session 1", peers_fall=True)
    other.took(1e-4)
    one.merge(pickle.loads(pickle.dumps(other)))
    assert (one.sent, one.wrong, one.rewinds, one.failed) == (7, 1, 2, 2)
    assert one.errors == {"ValueError": 1}
    assert one.examples == ["failed: session 1: ValueError: no"]
    assert one.longest_us == pytest.approx(100.0)


@pytest.mark.parametrize("mode", list(Mode))
def test_the_same_seed_makes_the_same_choices(mode: Mode) -> None:
    def choices(seed: int) -> list[tuple[object, ...]]:
        mirror, found = Mirror(VOCAB), []
        source = Turns(mode, VOCAB, 16, 4096, (seed, 0, 0))
        for _ in range(50):
            turn = source.turn(mirror, len(mirror))
            found += [(p.tokens.tolist(), p.rows, p.raw, p.rewind, turn.cancel, turn.close) for p in turn.parts]
            assert sum(len(p.tokens) for p in turn.parts) <= source.most_tokens
        return found

    assert choices(1) == choices(1)
    assert choices(1) != choices(2)


def test_the_same_seed_makes_the_same_generations() -> None:
    def draws(seed: int) -> list[object]:
        mirror, source, found = Mirror(VOCAB), Generations(VOCAB, 20_000, (seed, 0, 0)), []
        for _ in range(60):
            drawn = source.generation(mirror)
            found.append((drawn.tokens.tolist(), drawn.further, drawn.stop_tokens, drawn.leave_after, drawn.closes))
            mirror.feed(len(mirror), drawn.tokens)
            mirror.unfed = drawn.foreseen[0]
        return found

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_a_generation_is_foreseen_up_to_its_stop_token() -> None:
    source = Generations(VOCAB, 20_000, (5, 0, 0))
    stopped = 0
    for _ in range(200):
        drawn = source.generation(Mirror(VOCAB))
        h = advance(0, drawn.tokens.tolist())
        came: list[int] = []
        while len(came) <= drawn.further and not (came and came[-1] in drawn.stop_tokens):
            came.append(answer(h, VOCAB))
            h = advance(h, [came[-1]])
        assert drawn.foreseen == came
        assert drawn.stopped == (came[-1] in drawn.stop_tokens)
        stopped += drawn.stopped
    assert 20 < stopped < 180


def test_growth_is_seen_behind_a_warm_up() -> None:
    def series(values: list[float]) -> Series:
        course = Series("one", MEMORY)
        for i, value in enumerate(values):
            course.add(float(i), value)
        return course

    warm = series([*range(20), *[20.0] * 40])
    assert (warm.is_flat, warm.growth) == (True, 0.0)
    spiky = series([10.0, 10.0, 90.0, 10.0, 10.0] * 12)
    assert spiky.is_flat
    # Clients that come and go, each with memory of its own, some more of them towards the end.
    busy = series([7.0, 23.0, 7.0, 7.0] * 10 + [39.0, 23.0, 7.0, 39.0] * 5)
    assert (busy.is_flat, busy.growth) == (True, 0.0)
    # A moment without any is no sign that all is well, and none that it is not.
    lull = series([23.0] * 30 + [7.0] + [23.0] * 29)
    assert lull.is_flat
    leaking = series([7.0 + 16.0 * (i % 3) + 0.2 * i for i in range(60)])
    assert leaking.is_flat is False
    growing = series([0.2 * i for i in range(60)])
    assert growing.is_flat is False
    assert growing.slope == pytest.approx(12.0)
    assert series([1.0] * 10).is_flat is None


def test_what_a_process_holds_is_seen() -> None:
    before = held_by(os.getpid())
    # Not from the heap: what was freed there may be resident already.
    private = mmap.mmap(-1, 20 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    private[:: mmap.PAGESIZE] = b"x" * ((20 << 20) // mmap.PAGESIZE)
    segment = Segment.create(16 << 20, "a test")
    files = [open(os.devnull, "rb") for _ in range(7)]  # noqa: SIM115
    more = {quantity: held - before[quantity] for quantity, held in held_by(os.getpid()).items()}
    for file in files:
        file.close()
    assert more[MEMORY] == pytest.approx(20, abs=3)
    # A segment has a descriptor, and its mapping another one.
    assert more[DESCRIPTORS] == 9
    assert more[SHARED_MEMORY] == 16
    segment.close_descriptor()
    private.close()


def test_a_long_watch_keeps_few_samples() -> None:
    watch = Watch({"this one": os.getpid()})
    for i in range(5 * MOST_SAMPLES):
        watch.tick(i * SAMPLE_S)
    times = watch.series[0].times
    assert MOST_SAMPLES // 2 <= len(times) <= MOST_SAMPLES
    assert np.ptp(np.diff(times)) < 2 * watch.every_s


def test_a_hostile_peer_s_frames_are_frames() -> None:
    """Each is packed as it stands: what it says is the lie, not how."""
    for seed in range(300):
        for message in lie(random.Random(seed)):
            assert type(unpack(pack(message))) is type(message)

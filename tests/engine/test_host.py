"""The host process around an engine, driven over a real connection: what becomes of each step of a batch."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import pytest

from shmsched.engine import BatchView, Engine, EngineInfo, Limits
from shmsched.engine.host import EngineHost
from shmsched.errors import EngineStartError, ErrorCode, ProtocolError, ShmschedError
from shmsched.memory.layouts import GUARD, HEADER, SAMPLING, STEP, BatchSlotLayout, StepStatus
from shmsched.memory.segment import Segment
from shmsched.steps import OutputRows
from shmsched.wire import frames
from shmsched.wire.link import Link
from shmsched.wire.peer import Peer
from shmsched.workers.echo import PEAK, Echo, advance, answer

from processes.leftovers import wait_until

pytestmark = pytest.mark.usefixtures("no_leftovers")
VOCAB = 100
GREEDY = SAMPLING.pack(0, 0.0, 1.0, 0)
LIMITS = Limits(8, 16)
LAYOUT = BatchSlotLayout(LIMITS.max_batch_size)
DONE, DEFERRED, FAILED = StepStatus.DONE, StepStatus.DEFERRED, StepStatus.FAILED
UNTOUCHED = 99


class Step(NamedTuple):
    slot: int
    position: int
    tokens: Sequence[int]
    rows: OutputRows = OutputRows.LAST
    sampled: bool = True
    client: int = 0
    offset: int = 0


class Scheduler:
    """The other end: hands out the segment, writes batches into its slots in turn, and reads results from there."""

    def __init__(self, engine: Engine) -> None:
        ours, theirs = socket.socketpair()
        self.peer = Peer(ours)
        self.link = Link(Connection(theirs.detach()))
        self.arrived: list[Any] = []
        self.error: ShmschedError | None = None
        self.segment = Segment.create(2 * LAYOUT.size, "a test")
        self.batch = 0
        self._host = EngineHost(engine, self.link, "test-spec")
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._host.run()
        except ShmschedError as e:
            self.error = e
        finally:
            self.link.close()

    def say(self, message: Any, fd: int = -1) -> None:
        self.peer.send(message, fd)
        assert self.peer.flush()

    def hear(self, kind: type[Any]) -> Any:
        """The next frame, which must be of this kind."""
        wait_until(lambda: self.arrived or self.arrived.extend(self.peer.read() or []), f"a {kind.__name__} frame")
        message = self.arrived.pop(0)
        assert isinstance(message, kind), message
        return message

    def start(self) -> frames.Offer:
        offer: frames.Offer = self.hear(frames.Offer)
        self.say(frames.Attached(1, LIMITS.max_decode_sequences, LIMITS.max_prefill_chunk_size, 2), self.segment.fd)
        self.hear(frames.Ready)
        return offer

    def open(self, slot: int, options: bytes = b"") -> None:
        self.say(frames.OpenSlot(slot, 1000 + slot, options))
        assert self.hear(frames.SlotOpened) == frames.SlotOpened(slot, 1000 + slot)

    def write(self, steps: Sequence[Step]) -> None:
        self.batch += 1
        buffer, start, at = self.segment.buffer, 0, self.at
        for i, s in enumerate(steps):
            n = len(s.tokens)
            STEP.pack_into(
                buffer, at + LAYOUT.steps_offset + i * STEP.size,
                s.slot, start, n, s.position, s.rows, s.sampled, GREEDY, s.client, s.offset,
            )  # fmt: skip
            np.frombuffer(buffer, np.int32, n, at + LAYOUT.tokens_offset + 4 * start)[:] = s.tokens
            start += n
        HEADER.pack_into(buffer, at, self.batch, len(steps), start)
        at += LAYOUT.statuses_offset
        buffer[at : at + len(steps)] = bytes([UNTOUCHED]) * len(steps)

    @property
    def slot(self) -> int:
        """Of the batch that was written last."""
        return self.batch % 2

    @property
    def at(self) -> int:
        """Where that slot begins."""
        return LAYOUT.size * self.slot

    def run(self, *steps: Step) -> tuple[list[int], list[int], list[str]]:
        """Statuses of the steps, sampled tokens of all rows, messages of the steps that failed."""
        self.write(steps)
        self.say(frames.Work(self.batch, self.slot))
        return self.hear_results(steps)

    def follow(self, *steps: Step) -> None:
        """Have the host go on with these after the last batch: their tokens are places there."""
        self.write(steps)
        self.say(frames.Follow(self.batch, self.slot, self.batch - 1))

    def hear_results(self, steps: Sequence[Step]) -> tuple[list[int], list[int], list[str]]:
        """Of the last batch."""
        done = self.hear(frames.Done)
        assert done.batch == self.batch
        n_rows = sum(s.rows.count(len(s.tokens)) for s in steps if s.sampled)
        return (
            list(self.segment.buffer[self.at + LAYOUT.statuses_offset :][: len(steps)]),
            np.frombuffer(self.segment.buffer, np.int32, n_rows, self.at + LAYOUT.ids_offset).tolist(),
            list(done.messages),
        )

    def end(self) -> None:
        self.peer.close()
        self.thread.join(10)
        assert not self.thread.is_alive(), "the host goes on without a scheduler"
        self.segment.close_descriptor()


Start = Callable[[Engine], Scheduler]


@pytest.fixture
def start() -> Iterator[Start]:
    schedulers: list[Scheduler] = []

    def begin(engine: Engine) -> Scheduler:
        schedulers.append(Scheduler(engine))
        schedulers[-1].start()
        return schedulers[-1]

    yield begin
    for scheduler in schedulers:
        scheduler.end()


def last(*tokens: int) -> int:
    return answer(advance(0, tokens), VOCAB)


class Commanded(Echo):
    """Echo, with tokens that are commands. What is deferred or failed is not taken."""

    DEFER, FAIL, RAISE, NOTHING, WILD, LONG = range(90, 96)

    def __init__(self) -> None:
        super().__init__(vocab=VOCAB)
        self.closed = 0

    def open_session(self, slot: int, options: bytes) -> None:
        if options == b"bad":
            raise ValueError("no adapter is named 'bad'")
        super().open_session(slot, options)

    def close(self) -> None:
        self.closed += 1

    def forward(self, batch: BatchView) -> None:
        for i, (slot, begin, length) in enumerate(batch.steps):
            hashes, mine = self._hashes[slot], batch.tokens[begin : begin + length].tolist()
            if self.RAISE in mine:
                raise RuntimeError("out of luck")
            if self.DEFER in mine:
                batch.defer(i)
                continue
            if self.FAIL in mine:
                batch.fail(i, f"slot {slot} will not")
                continue
            if self.LONG in mine:
                batch.fail(i, "€" * 100_000)
                continue
            assert len(hashes) - 1 == batch.positions[begin], "the host ran a step where its session does not stand"
            for t in mine:
                hashes.append(advance(hashes[-1], [t]))
            for k in np.flatnonzero((batch.outputs >= begin) & (batch.outputs < begin + length)).tolist():
                token = int(batch.tokens[batch.outputs[k]])
                if token == self.WILD:
                    batch.set_tokens(k, [VOCAB])
                elif token != self.NOTHING:
                    at = int(batch.positions[batch.outputs[k]])
                    batch.rows[k][:] = 0
                    batch.rows[k][answer(hashes[at + 1], VOCAB)] = PEAK


DEFER, FAIL, RAISE, NOTHING, WILD, LONG = range(90, 96)


def test_the_offer_says_what_the_engine_is() -> None:
    class Limited(Engine):
        def __init__(self) -> None:
            self.info = EngineInfo(
                model="limited",
                vocab_size=7,
                max_sessions=2,
                max_session_tokens=9,
                max_batch_size=30,
                stop_tokens=(1, 3),
            )

    scheduler = Scheduler(Limited())
    assert scheduler.start() == frames.Offer(7, 2, 9, 30, 0, 0, 0, 0, "limited", "", (1, 3), "test-spec")
    scheduler.end()
    other = Scheduler(Echo(vocab=VOCAB))
    assert other.start().rewinds == frames.Rewinds.ANYWHERE
    other.end()
    stateful = Echo(vocab=VOCAB)
    stateful.info = replace(stateful.info, rewinds_anywhere=False)
    third = Scheduler(stateful)
    assert third.start().rewinds == frames.Rewinds.TO_THE_BEGINNING
    third.end()


def test_decodes_and_chunks_in_one_batch(start: Start) -> None:
    scheduler = start(Commanded())
    for slot in (0, 5):
        scheduler.open(slot)
    assert scheduler.run(Step(0, 0, [1, 2, 3])) == ([DONE], [last(1, 2, 3)], [])
    statuses, ids, messages = scheduler.run(
        Step(0, 3, [4]),
        Step(5, 0, [7, 8], OutputRows.NONE),
        Step(5, 2, [9, 10], OutputRows.ALL),
    )
    assert (statuses, messages) == ([DONE] * 3, [])
    assert ids == [last(1, 2, 3, 4), last(7, 8, 9), last(7, 8, 9, 10)]


def test_a_chunk_that_rewinds_runs_after_the_one_before_it(start: Start) -> None:
    scheduler = start(Commanded())
    scheduler.open(0)
    scheduler.open(1)
    statuses, ids, _ = scheduler.run(
        Step(0, 0, [1, 2, 3]), Step(1, 0, [5]), Step(0, 1, [9], OutputRows.ALL), Step(0, 2, [4])
    )
    assert statuses == [DONE] * 4
    assert ids == [last(1, 2, 3), last(5), last(1, 9), last(1, 9, 4)]


def test_raw_rows_go_to_the_client_s_arena_and_nowhere_else(start: Start) -> None:
    scheduler = start(Commanded())
    scheduler.open(0)
    arena = Segment.create(2048, "an arena")
    scheduler.say(frames.AttachArena(77, arena.size), arena.fd)
    arena.close_descriptor()
    cells = np.frombuffer(arena.buffer, np.float32)
    cells[:] = 5
    offset = 256
    statuses, ids, _ = scheduler.run(Step(0, 0, [1, 2], OutputRows.ALL, False, 77, offset), Step(0, 2, [3]))
    assert (statuses, ids) == ([DONE, DONE], [last(1, 2, 3)])
    first, end = offset // 4, offset // 4 + 2 * VOCAB
    assert cells[first:end].reshape(2, VOCAB).argmax(axis=1).tolist() == [last(1), last(1, 2)]
    # Beside the rows lie the guards, and beyond those nothing of this step's.
    assert (cells[: first - GUARD // 4] == 5).all()
    assert (cells[end + GUARD // 4 :] == 5).all()
    scheduler.say(frames.DetachArena(77))
    scheduler.write([Step(0, 3, [3], OutputRows.LAST, False, 77, offset)])
    scheduler.say(frames.Work(scheduler.batch, 0))
    assert isinstance(scheduler.hear(frames.BatchFailed), frames.BatchFailed)


def test_a_step_that_is_deferred_takes_its_later_ones_with_it_and_nobody_else(start: Start) -> None:
    scheduler = start(Commanded())
    scheduler.open(0)
    scheduler.open(1)
    statuses, ids, messages = scheduler.run(
        Step(0, 0, [1, DEFER]), Step(1, 0, [6]), Step(0, 2, [3]), Step(0, 1, [4], OutputRows.LAST)
    )
    assert (statuses, messages) == ([DEFERRED, DONE, DEFERRED, DEFERRED], [])
    assert ids[1] == last(6)
    assert scheduler.run(Step(0, 0, [1, 2]))[:2] == ([DONE], [last(1, 2)])


def test_a_step_that_fails_says_why_and_its_session_goes_on_from_before_it(start: Start) -> None:
    scheduler = start(Commanded())
    scheduler.open(0)
    scheduler.open(1)
    scheduler.run(Step(0, 0, [1, 2]))
    statuses, ids, messages = scheduler.run(Step(0, 2, [FAIL]), Step(1, 0, [6]), Step(0, 1, [3]))
    assert statuses == [FAILED, DONE, FAILED]
    assert messages == ["slot 0 will not"] * 2
    assert ids[1] == last(6)
    assert scheduler.run(Step(0, 2, [3]))[:2] == ([DONE], [last(1, 2, 3)])


def test_missing_and_impossible_results_fail_their_steps_only(start: Start) -> None:
    scheduler = start(Commanded())
    for slot in range(3):
        scheduler.open(slot)
    statuses, ids, messages = scheduler.run(Step(0, 0, [NOTHING]), Step(1, 0, [WILD]), Step(2, 0, [6]))
    assert statuses == [FAILED, FAILED, DONE]
    assert messages == [
        "the engine gave no result for row 0 of this step",
        f"the engine gave token {VOCAB}; the vocabulary has {VOCAB}",
    ]
    assert ids[2] == last(6)


def test_messages_of_any_length_still_make_an_answer(start: Start) -> None:
    scheduler = start(Commanded())
    for slot in range(8):
        scheduler.open(slot)
    statuses, _, messages = scheduler.run(*[Step(slot, 0, [LONG]) for slot in range(8)])
    assert statuses == [FAILED] * 8
    assert all(message.startswith("€€€") for message in messages)


def test_an_engine_that_raises_fails_the_batch_and_goes_on(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    scheduler = start(Commanded())
    scheduler.open(0)
    scheduler.write([Step(0, 0, [RAISE])])
    scheduler.say(frames.Work(1, scheduler.slot))
    assert scheduler.hear(frames.BatchFailed) == frames.BatchFailed(1, "RuntimeError: out of luck")
    assert scheduler.segment.buffer[scheduler.at + LAYOUT.statuses_offset] == UNTOUCHED
    assert "out of luck" in capfd.readouterr().err
    scheduler.say(frames.CloseSlot(0))
    scheduler.open(0)
    assert scheduler.run(Step(0, 0, [1]))[:2] == ([DONE], [last(1)])


def test_a_step_beyond_its_session_s_end_or_of_no_session_fails(start: Start) -> None:
    scheduler = start(Commanded())
    scheduler.open(0)
    statuses, _, messages = scheduler.run(Step(0, 5, [1]), Step(3, 0, [1]))
    assert statuses == [FAILED, FAILED]
    assert messages == [
        "the step starts at position 5; slot 0 holds 0 tokens",
        "the step starts at position 0; slot 3 holds 0 tokens",
    ]


def test_an_engine_that_cannot_rewind_fails_the_step_that_does(start: Start) -> None:
    class Forward(Commanded):
        rewind = Engine.rewind

    scheduler = start(Forward())
    scheduler.open(0)
    scheduler.run(Step(0, 0, [1, 2]))
    statuses, _, messages = scheduler.run(Step(0, 1, [3]))
    assert statuses == [FAILED]
    assert messages == ["cannot rewind from 2 to 1: Unsupported: Forward cannot rewind a session"]
    assert scheduler.run(Step(0, 2, [3]))[:2] == ([DONE], [last(1, 2, 3)])


def test_a_session_that_the_engine_refuses(start: Start) -> None:
    scheduler = start(Commanded())
    scheduler.say(frames.OpenSlot(2, 9, b"bad"))
    refused = scheduler.hear(frames.SlotRefused)
    assert refused == frames.SlotRefused(2, 9, ErrorCode.ENGINE_ERROR, "ValueError: no adapter is named 'bad'")
    scheduler.say(frames.CloseSlot(2))
    scheduler.open(2, b"good")


def test_a_slot_that_holds_another_batch_is_not_run(start: Start) -> None:
    scheduler = start(Commanded())
    scheduler.open(0)
    scheduler.write([Step(0, 0, [1])])
    scheduler.say(frames.Work(7, scheduler.slot))
    scheduler.thread.join(10)
    assert isinstance(scheduler.error, ProtocolError)
    assert "told to run batch 7, but the slot holds batch 1" in str(scheduler.error)


# --- batches that follow another ------------------------------------------------------------------------------------------


def test_a_batch_that_follows_another_takes_its_tokens_from_there(start: Start) -> None:
    scheduler = start(Commanded())
    for slot in range(3):
        scheduler.open(slot)
    _, sampled, _ = scheduler.run(Step(0, 0, [1, 2]), Step(1, 0, [3]), Step(2, 0, [4]))
    # One of the three is over, and the others come in another order.
    steps = Step(2, 1, [2]), Step(0, 2, [0])
    scheduler.follow(*steps)
    assert scheduler.hear_results(steps) == (
        [DONE] * 2,
        [last(4, sampled[2]), last(1, 2, sampled[0])],
        [],
    )


@pytest.mark.parametrize("token", [DEFER, FAIL, NOTHING, WILD])
def test_a_batch_that_follows_one_not_wholly_done_is_skipped(start: Start, token: int) -> None:
    scheduler = start(Commanded())
    for slot in range(2):
        scheduler.open(slot)
    scheduler.run(Step(0, 0, [1]), Step(1, 0, [token]))
    scheduler.follow(Step(0, 1, [0]))
    assert scheduler.hear(frames.Skipped) == frames.Skipped(2)
    assert scheduler.run(Step(0, 1, [5])) == ([DONE], [last(1, 5)], []), "the session stands where it stood"


def test_a_batch_that_follows_one_in_which_the_engine_raised_is_skipped(start: Start) -> None:
    scheduler = start(Commanded())
    scheduler.open(0)
    assert scheduler.run(Step(0, 0, [1]))[0] == [DONE]
    scheduler.write([Step(0, 1, [RAISE])])
    scheduler.say(frames.Work(scheduler.batch, scheduler.slot))
    assert scheduler.hear(frames.BatchFailed).batch == 2
    scheduler.follow(Step(0, 2, [0]))
    assert scheduler.hear(frames.Skipped) == frames.Skipped(3)


def test_a_batch_that_follows_one_that_was_skipped_is_skipped(start: Start) -> None:
    scheduler = start(Commanded())
    scheduler.open(0)
    scheduler.run(Step(0, 0, [FAIL]))
    for batch in (2, 3):
        scheduler.follow(Step(0, 1, [0]))
        assert scheduler.hear(frames.Skipped) == frames.Skipped(batch)


def test_a_place_beyond_the_batch_before_is_a_broken_scheduler(start: Start) -> None:
    scheduler = start(Commanded())
    scheduler.open(0)
    scheduler.run(Step(0, 0, [1]))
    scheduler.follow(Step(0, 1, [1]))
    scheduler.thread.join(10)
    assert isinstance(scheduler.error, ProtocolError)
    assert "follows one of 1 sampled tokens" in str(scheduler.error)


def test_the_engine_is_closed_when_the_scheduler_ends() -> None:
    engine = Commanded()
    scheduler = Scheduler(engine)
    scheduler.start()
    scheduler.end()
    assert engine.closed == 1


def test_a_start_that_fails_is_told_and_a_refusal_is_raised() -> None:
    class Heavy(Echo):
        def start(self, limits: Limits) -> None:
            raise MemoryError("72 GB")

    scheduler = Scheduler(Heavy())
    scheduler.hear(frames.Offer)
    scheduler.say(
        frames.Attached(1, LIMITS.max_decode_sequences, LIMITS.max_prefill_chunk_size, 1), scheduler.segment.fd
    )
    assert scheduler.hear(frames.StartFailed) == frames.StartFailed("MemoryError: 72 GB")
    scheduler.end()
    assert isinstance(scheduler.error, EngineStartError)

    scheduler = Scheduler(Echo(vocab=VOCAB))
    scheduler.hear(frames.Offer)
    scheduler.say(frames.Refused(ErrorCode.INVALID_REQUEST, "the vocabulary differs"))
    scheduler.thread.join(10)
    assert "the vocabulary differs" in str(scheduler.error)
    scheduler.end()


def test_the_host_keeps_no_descriptor_of_what_it_maps_under_its_number(start: Start) -> None:
    """Only the mapping's own stays: whatever the scheduler attaches and detaches, their number does not grow."""
    scheduler = start(Commanded())
    scheduler.open(0)

    def attach(client: int) -> int:
        arena = Segment.create(4096, "an arena")
        scheduler.say(frames.AttachArena(client, 4096), arena.fd)
        arena.close_descriptor()
        scheduler.say(frames.DetachArena(client))
        scheduler.run(Step(0, 0, [1]))
        return len(os.listdir("/proc/self/fd"))

    # Scheduler and host share this process with what earlier tests left to the collector, which may close theirs meanwhile.
    gc.collect()
    counts = [attach(client) for client in range(5)]
    assert max(counts[1:]) == counts[1]

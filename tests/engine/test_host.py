"""The host process around an engine, driven over a real connection: what becomes of each step of a batch."""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import numpy as np
import pytest
from engine.played import (
    DEFER,
    DEFERRED,
    DONE,
    FAIL,
    FAILED,
    LONG,
    NOTHING,
    RAISE,
    VOCAB,
    WILD,
    Commanded,
    Start,
    last,
)

from shmsched.dataplane.layouts import GUARD
from shmsched.engine import Engine, EngineInfo, Limits
from shmsched.errors import EngineStartError, ErrorCode, ProtocolError
from shmsched.memory.segment import Segment
from shmsched.params import OutputRows
from shmsched.wire import frames
from shmsched.workers.echo import Echo

from support.peers.scheduler import LAYOUT, LIMITS, UNTOUCHED, Scheduler, Step

pytestmark = pytest.mark.usefixtures("no_leftovers")


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


@pytest.mark.prints("KeyError: 77")
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
    (message,) = messages
    assert message.startswith("cannot rewind from 2 to 1: Unsupported: Forward cannot rewind a session")
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


def test_the_engine_is_closed_when_the_scheduler_ends() -> None:
    engine = Commanded()
    scheduler = Scheduler(engine)
    scheduler.start()
    scheduler.end()
    assert engine.closed == 1


@pytest.mark.prints("MemoryError: 72 GB", "did not start:$")
def test_a_start_that_fails_is_told_and_a_refusal_is_raised() -> None:
    class Heavy(Echo):
        def start(self, limits: Limits) -> None:
            raise MemoryError("72 GB")

    scheduler = Scheduler(Heavy())
    scheduler.hear(frames.Offer)
    scheduler.say(
        frames.Attached(1, LIMITS.max_decode_sequences, LIMITS.max_prefill_chunk_size, 1), scheduler.segment.fd
    )
    assert scheduler.hear(frames.StartFailed).message.startswith("MemoryError: 72 GB (at test_host.py:")
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

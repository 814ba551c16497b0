"""One test for each rule of spec/scheduling.md, named after it."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np
import pytest

from shmsched.dataplane.queues import StepQueues
from shmsched.dataplane.step import QueuedStep
from shmsched.errors import InvalidRequest, StepFailed
from shmsched.params import OutputRows, RequestParams, SamplingParams
from shmsched.scheduling import Batch, Scheduler, SchedulerParams
from shmsched.scheduling import scheduler as scheduler_module
from shmsched.steps import LogitsBlock, Request

DEADLINE = 30.0


def D(request_id: int, session: int) -> Request:
    return Request(request_id, session, [7])


def P(request_id: int, session: int, n: int) -> Request:
    return Request(request_id, session, [7] * n)


def scheduler_with(d: int, c: int, *requests: Request, exclusive: bool = False) -> Scheduler:
    scheduler = Scheduler(SchedulerParams(d, c), exclusive_sessions=exclusive)
    for request in requests:
        assert not scheduler.submit(request).done()
    return scheduler


def ids(batch: Batch) -> list[int]:
    return [request.request_id for request in batch.requests]


def batches(scheduler: Scheduler, n: int) -> list[list[int]]:
    return [ids(scheduler.get_work()) for _ in range(n)]


def rejection(future: Future[Any]) -> str:
    error = future.exception(timeout=0)
    assert isinstance(error, InvalidRequest)
    return str(error)


def in_threads(*jobs: Callable[[], object]) -> None:
    """Run all at once, to their end; what one raises is raised here."""
    barrier = threading.Barrier(len(jobs), timeout=DEADLINE)
    errors: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        try:
            barrier.wait()
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


# Limits


def test_l1_defaults_and_derived_batch_size() -> None:
    params = SchedulerParams()
    assert (params.max_decode_sequences, params.max_prefill_chunk_size, params.max_batch_size) == (32, 256, 544)
    assert Scheduler().params == params
    with pytest.raises(TypeError):
        SchedulerParams(max_batch_size=544)  # type: ignore[call-arg]


def test_l2_limits_are_immutable_and_checked() -> None:
    largest = SchedulerParams(1, 2**30 - 1)
    assert largest.max_batch_size == 2**31 - 1
    for d, c in [(2, 2**30 - 1), (1, 2**30), (0, 1), (1, 0), (-1, 1), (1, -1)]:
        with pytest.raises(ValueError, match="is"):
            SchedulerParams(d, c)
    with pytest.raises(AttributeError):
        largest.max_decode_sequences = 2  # type: ignore[misc]


def test_l3_a_full_chunk_fits_beside_saturated_decodes() -> None:
    scheduler = scheduler_with(3, 4, *(D(i, i) for i in range(1, 5)), P(9, 9, 4))
    assert ids(scheduler.get_work()) == [1, 2, 3, 9]
    assert scheduler.params.max_batch_size > scheduler.params.max_decode_sequences


# What a step is


def test_s1_one_token_is_a_decode_whatever_it_was_meant_as() -> None:
    scheduler = scheduler_with(1, 4, P(1, 1, 2), P(2, 2, 1), D(3, 3))
    assert batches(scheduler, 2) == [[2, 1], [3]]


class OnlyLength:
    """Tokens that can be counted and nothing else."""

    def __len__(self) -> int:
        return 3

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"tokens.{name} was read")


def test_s2_only_id_session_and_length_are_read() -> None:
    class Bare:
        request_id, session_id, tokens = 1, 2, OnlyLength()

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"request.{name} was read")

    request: Any = Bare()
    scheduler = scheduler_with(1, 4, request)
    batch = scheduler.get_work()
    assert batch.requests[0] is request
    assert batch.n_tokens == 3
    assert scheduler.complete(1, [5])


@pytest.mark.parametrize("rows", list(OutputRows))
@pytest.mark.parametrize("sampling", [None, SamplingParams()])
def test_s3_all_combinations_of_rows_and_sampling_are_legal(rows: OutputRows, sampling: SamplingParams | None) -> None:
    params = RequestParams(5, sampling, rows)
    scheduler = scheduler_with(1, 4, Request(1, 1, [1], params), Request(2, 2, [1, 2], params))
    assert [request.params for request in scheduler.get_work().requests] == [params, params]


def test_s4_a_batch_sums_its_tokens() -> None:
    scheduler = scheduler_with(2, 4, D(1, 1), P(2, 2, 3), P(3, 3, 4))
    batch = scheduler.get_work()
    assert batch.n_tokens == 8
    assert batch
    empty = scheduler.get_work()
    assert (empty.requests, empty.n_tokens, bool(empty)) == ((), 0, False)


# submit


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (P(5, 1, 0), ["request 5", "0 tokens", "256"]),
        (P(6, 1, 257), ["request 6", "257 tokens", "max_prefill_chunk_size=256"]),
        (D(1, 2), ["request 1", "outstanding"]),
        (D(2, 2), ["request 2", "outstanding"]),
        (Request(7, 1, 3), ["request 7", "length"]),  # type: ignore[arg-type]
    ],
)
def test_u1_rejected_with_a_failed_future_and_in_no_count(request_: Request, says: list[str]) -> None:
    scheduler = scheduler_with(32, 256, D(2, 1))
    scheduler.get_work()
    scheduler.submit(D(1, 1))
    before = scheduler.counts
    message = rejection(scheduler.submit(request_))
    assert all(word in message for word in says), message
    assert scheduler.counts == before
    assert ids(scheduler.get_work()) == [1]


def test_u2_an_id_is_free_again_once_settled() -> None:
    scheduler = scheduler_with(1, 4, D(1, 1))
    scheduler.get_work()
    scheduler.complete(1, [1])
    again, same = scheduler.submit(D(1, 1)), scheduler.submit(D(2, 1))
    assert batches(scheduler, 2) == [[1], [2]]
    assert scheduler.complete(1, [5])
    assert scheduler.complete(2, [6])
    assert [f.result(timeout=0).tokens.tolist() for f in (again, same)] == [[5], [6]]


def test_u3_next_request_id_is_unique_across_threads_and_among_outstanding() -> None:
    scheduler = scheduler_with(1, 4, D(1, 1), D(50, 1))
    got: list[int] = []
    in_threads(*[lambda: got.extend([scheduler.next_request_id() for _ in range(500)])] * 4)
    assert len(set(got)) == 2000
    assert not {1, 50} & set(got)


@pytest.mark.parametrize("n", [2**31, 2**32 + 1, sys.maxsize, sys.maxsize + 1, 2**64 + 1])
def test_u4_no_length_however_large_wraps(n: int) -> None:
    class Huge:
        def __len__(self) -> int:
            return n

    scheduler = Scheduler()
    tokens: Any = Huge()
    assert "request 1" in rejection(scheduler.submit(Request(1, 1, tokens)))
    assert scheduler.counts.submitted == 0


# get_work


def test_g1_decodes_first_in_arrival_order_over_sessions() -> None:
    scheduler = scheduler_with(3, 4, D(1, 1), D(2, 1), P(3, 3, 2), D(4, 2), D(5, 3))
    assert batches(scheduler, 2) == [[1, 2, 4, 3], [5]]


def test_g2_passes_repeat_so_a_lone_session_fills_the_batch() -> None:
    scheduler = scheduler_with(1, 4, *(P(i, 1, 2) for i in range(1, 7)))
    assert batches(scheduler, 2) == [[1, 2, 3, 4], [5, 6]]


def test_g3_a_smaller_chunk_may_use_the_room() -> None:
    scheduler = scheduler_with(1, 4, P(1, 1, 4), P(2, 2, 3), P(3, 3, 4), P(4, 4, 2))
    assert batches(scheduler, 2) == [[1, 2, 4], [3]]


def test_g4_those_that_took_nothing_stand_ahead() -> None:
    scheduler = scheduler_with(1, 4, P(1, 1, 4), P(2, 2, 3), P(3, 3, 4), P(4, 4, 2), P(5, 5, 4))
    assert batches(scheduler, 2) == [[1, 2, 4], [3, 5]]


def test_g5_long_prompt_cannot_hog() -> None:
    scheduler = scheduler_with(2, 4, *(P(i, 1, 4) for i in (1, 2, 3, 4)), P(5, 2, 4), P(6, 2, 4))
    assert batches(scheduler, 3) == [[1, 5], [2, 6], [3, 4]]


def test_g6_fair_over_calls() -> None:
    scheduler = scheduler_with(1, 4, *(P(8 * s + i, s, 4) for s in range(3) for i in range(8)))
    served = Counter(request.session_id for _ in range(9) for request in scheduler.get_work().requests)
    assert served == {0: 6, 1: 6, 2: 6}


def test_g7_a_drained_session_rejoins_at_the_back() -> None:
    scheduler = scheduler_with(1, 4, P(1, 1, 4), P(2, 2, 4), P(3, 2, 4), P(4, 3, 4))
    assert ids(scheduler.get_work()) == [1, 2]
    scheduler.submit(P(5, 1, 4))
    assert batches(scheduler, 2) == [[4, 3], [5]]


def test_g7_who_replaces_a_failed_chunk_before_a_pass_comes_to_it_keeps_its_turn() -> None:
    scheduler = scheduler_with(1, 4, P(1, 1, 4), P(2, 2, 4), P(3, 3, 4))
    scheduler.fail(1, "why")
    scheduler.submit(P(4, 1, 4))
    assert batches(scheduler, 2) == [[4, 2], [3]]
    scheduler = scheduler_with(1, 4, P(1, 1, 4), P(2, 2, 4), P(3, 3, 4), P(5, 4, 4))
    scheduler.fail(1, "why")
    assert ids(scheduler.get_work()) == [2, 3]
    scheduler.submit(P(4, 1, 4))
    assert ids(scheduler.get_work()) == [5, 4]


def test_g7_where_the_room_is_spent_before_the_pass_comes_to_a_vacated_turn_it_is_kept_for_another_batch() -> None:
    chunks = (P(1, 1, 4), P(2, 2, 4), P(3, 3, 4), P(4, 4, 4), P(5, 5, 4))
    scheduler = scheduler_with(1, 4, *chunks, D(6, 6), D(7, 6))
    for request_id in (3, 4):
        scheduler.fail(request_id, "why")
    assert ids(scheduler.get_work()) == [6, 1, 2]
    scheduler.submit(P(8, 4, 4))
    assert ids(scheduler.get_work()) == [7, 8, 5]
    scheduler = scheduler_with(1, 4, *chunks)
    scheduler.fail(3, "why")
    assert ids(scheduler.get_work()) == [1, 2]  # one token of room is left, so the pass goes on to the end
    scheduler.submit(P(8, 3, 4))
    assert batches(scheduler, 2) == [[4, 5], [8]]


def test_g7_many_vacated_turns_are_kept() -> None:
    sessions = range(1, 1001)
    scheduler = scheduler_with(1, 4, *(P(s, s, 4) for s in sessions))
    for session in sessions:
        scheduler.fail(session, "why")
    for session in reversed(sessions):
        scheduler.submit(P(session, session, 4))
    assert batches(scheduler, 500) == [[s, s + 1] for s in sessions[::2]]


def test_g7_a_session_that_is_dropped_gives_its_vacated_turn_up() -> None:
    scheduler = scheduler_with(1, 4, P(1, 1, 4), P(2, 2, 4), P(3, 3, 4))
    scheduler.fail(1, "why")
    assert scheduler.cancel_session(1) == []
    scheduler.submit(P(4, 1, 4))
    assert batches(scheduler, 2) == [[2, 3], [4]]


def test_g7_a_chunk_put_back_is_the_last_of_its_session_again() -> None:
    scheduler = scheduler_with(1, 4, P(1, 1, 4))
    scheduler.get_work()
    scheduler.submit(P(2, 1, 4))
    scheduler.fail(2, "why")
    scheduler.requeue(1)
    for request in (P(3, 2, 4), D(4, 4)):
        scheduler.submit(request)
    assert ids(scheduler.get_work()) == [4, 1, 3]
    for request in (P(5, 3, 4), P(6, 4, 4), P(7, 1, 4)):
        scheduler.submit(request)
    assert batches(scheduler, 2) == [[5, 6], [7]]


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("taken", range(4))
def test_g8_a_batch_that_cannot_be_built_loses_nothing(exclusive: bool, taken: int) -> None:
    def fill() -> StepQueues:
        queues = StepQueues(2, 10, exclusive)
        for number, session, n in [
            (1, 1, 1), (2, 2, 1), (3, 1, 1), (4, 4, 3), (5, 5, 4), (6, 4, 2), (7, 5, 2), (8, 8, 1), (9, 2, 1), (10, 1, 1), (11, 9, 1),
        ]:  # fmt: skip
            queues.push(QueuedStep(number, session, n))
        for _ in range(taken):
            queues.take()
        return queues

    def drain(queues: StepQueues) -> list[list[int]]:
        return [[step.number for step in queues.take()] for _ in range(6)]

    def no_room(steps: list[QueuedStep]) -> None:
        assert steps
        raise KeyboardInterrupt

    queues = fill()
    before = len(queues), queues.ready_decodes, queues.queued_chunks
    with pytest.raises(KeyboardInterrupt):
        queues.hand_over(no_room)
    assert (len(queues), queues.ready_decodes, queues.queued_chunks) == before
    assert drain(queues) == drain(fill())


def test_g8_the_scheduler_loses_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_with(1, 4, D(1, 1), P(2, 2, 4), P(3, 3, 4), P(4, 4, 4))

    def no_memory(*_: object) -> Batch:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(scheduler_module, "Batch", no_memory)
        with pytest.raises(MemoryError):
            scheduler.get_work()
    counts = scheduler.counts
    assert (counts.queued, counts.in_flight) == (4, 0)
    assert batches(scheduler, 2) == [[1, 2, 3], [4]]


def test_g9_order_in_a_batch() -> None:
    scheduler = scheduler_with(2, 4, P(1, 1, 2), D(2, 2), P(3, 3, 2), P(4, 1, 2), D(5, 5))
    assert ids(scheduler.get_work()) == [2, 5, 1, 3, 4]


# Settling


def test_c1_complete_fills_in_the_ids() -> None:
    scheduler = Scheduler()
    sampled, raw, none = (scheduler.submit(P(i, 10 + i, 2)) for i in (1, 2, 3))
    scheduler.get_work()
    block = LogitsBlock(np.zeros((2, 5), np.float32))
    assert scheduler.complete(1, np.array([4, 5], np.int32))
    assert scheduler.complete(2, block)
    assert scheduler.complete(3, [])
    response = sampled.result(timeout=0)
    assert (response.request_id, response.session_id, response.tokens.tolist()) == (1, 11, [4, 5])
    assert response.tokens.dtype == np.int64
    assert response.logits is None
    assert raw.result(timeout=0).logits is block
    assert none.result(timeout=0).tokens.shape == (0,)


def test_c1_the_answer_is_a_copy() -> None:
    scheduler = scheduler_with(1, 4)
    future = scheduler.submit(D(1, 1))
    scheduler.get_work()
    buffer = np.array([3], np.int64)
    scheduler.complete(1, buffer)
    buffer[0] = 9
    assert future.result(timeout=0).tokens.tolist() == [3]


def test_c2_fail_carries_why_queued_or_in_flight_from_the_middle_too() -> None:
    scheduler = scheduler_with(2, 4)
    futures = {
        r.request_id: scheduler.submit(r) for r in (D(1, 1), D(2, 1), D(3, 1), P(4, 1, 3), P(5, 1, 3), P(6, 1, 3))
    }
    assert scheduler.fail(2, "out of luck")
    assert scheduler.fail(5, "out of luck")
    assert scheduler.queued == 4
    assert ids(scheduler.get_work()) == [1, 3, 4, 6]
    assert scheduler.fail(3, "out of luck")
    for request_id in (2, 3, 5):
        error = futures[request_id].exception(timeout=0)
        assert isinstance(error, StepFailed)
        assert "out of luck" in str(error)
        assert f"request {request_id} of session 1" in str(error)
    assert scheduler.counts.in_flight == 3


def test_c3_fail_all_settles_everything_and_the_scheduler_goes_on() -> None:
    scheduler = scheduler_with(1, 4)
    futures = [scheduler.submit(request) for request in (D(1, 1), D(2, 2), P(3, 3, 4))]
    scheduler.get_work()
    assert scheduler.fail_all("gone") == 3
    assert all("gone" in str(future.exception(timeout=0)) for future in futures)
    assert not scheduler.has_work
    assert not scheduler.get_work()
    again = scheduler.submit(D(1, 1))
    assert ids(scheduler.get_work()) == [1]
    assert scheduler.complete(1, [1])
    assert again.done()


def test_c4_complete_and_fail_race_and_one_settles() -> None:
    scheduler = Scheduler(SchedulerParams(500, 4))
    futures = [scheduler.submit(D(i, i)) for i in range(500)]
    settled: list[int] = []
    for future in futures:
        future.add_done_callback(lambda _: settled.append(1))
    scheduler.get_work()
    won: list[bool] = []
    jobs: list[Callable[[], object]] = [
        lambda: won.extend([scheduler.complete(i, [1]) for i in range(500)]),
        lambda: won.extend([scheduler.fail(i, "why") for i in range(500)]),
    ]
    in_threads(*jobs, *jobs)
    counts = scheduler.counts
    assert sum(won) == len(settled) == counts.completed + counts.failed == 500
    assert counts.ignored == 1500
    assert not scheduler.complete(9999, [1])
    assert not scheduler.fail(9999, "why")


def test_c5_complete_on_a_queued_step_is_ignored_and_it_still_runs() -> None:
    scheduler = scheduler_with(1, 4)
    future = scheduler.submit(D(1, 1))
    assert not scheduler.complete(1, [1])
    assert not future.done()
    assert ids(scheduler.get_work()) == [1]
    assert scheduler.complete(1, [2])
    assert future.result(timeout=0).tokens.tolist() == [2]
    assert scheduler.counts.ignored == 1


def test_c6_the_tokens_are_not_copied_and_not_kept_once_settled() -> None:
    scheduler = Scheduler()
    tokens = [np.arange(5) for _ in range(3)]
    alive = [weakref.ref(array) for array in tokens]
    futures = [scheduler.submit(Request(i, i, array)) for i, array in enumerate(tokens)]
    assert [r.tokens is array for r, array in zip(scheduler.get_work().requests, tokens, strict=True)] == [True] * 3
    del tokens
    gc.disable()  # no cycle may hold them until a collection
    try:
        scheduler.complete(0, [1])
        scheduler.fail(1, "why")
        scheduler.requeue(2)
        assert scheduler.cancel_session(2)
        assert [ref() for ref in alive] == [None] * 3
    finally:
        gc.enable()
    assert all(future.done() for future in futures)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        5,
        5.0,
        "5",
        [1.5],
        [True],
        [[1], [2]],
        [[1], [2, 3]],
        [None],
        {1},
        np.zeros(2, np.float32),
        [2**63],
        [2**64],
    ],
)
def test_c7_no_answer_is_an_error_and_the_step_stays_in_flight(answer: Any) -> None:
    scheduler = scheduler_with(1, 4)
    future = scheduler.submit(D(1, 1))
    scheduler.get_work()
    with pytest.raises(TypeError, match="request 1 .*still in flight"):
        scheduler.complete(1, answer)
    assert scheduler.pending(1)
    assert not future.done()
    assert scheduler.complete(1, [1])


# Counters


def test_q1_queued_is_exact_under_any_interleaving() -> None:
    scheduler = Scheduler(SchedulerParams(4, 4))
    n, threads = 300, 3
    seen: list[int] = []

    def submit(base: int) -> None:
        for i in range(n):
            scheduler.submit(D(base + i, base) if i % 3 else P(base + i, base, 2))

    def settle() -> None:
        while sum(seen) < n * threads:
            batch = scheduler.get_work()
            seen.append(len(batch))
            for i, request in enumerate(batch.requests):
                if i % 2:
                    assert scheduler.complete(request.request_id, [1])
                else:
                    assert scheduler.fail(request.request_id, "why")

    def observe() -> None:
        while sum(seen) < n * threads:
            assert scheduler.counts.balanced
            assert 0 <= scheduler.queued <= n * threads

    in_threads(*(lambda t=t: submit(1000 * t) for t in range(threads)), settle, settle, observe)
    counts = scheduler.counts
    assert (counts.submitted, counts.queued, counts.in_flight) == (n * threads, 0, 0)
    assert counts.completed + counts.failed == n * threads


def test_q1_failing_a_step_in_flight_does_not_count_it_out_of_the_queue() -> None:
    scheduler = scheduler_with(1, 4, D(1, 1), D(2, 2))
    scheduler.get_work()
    assert (scheduler.queued, scheduler.has_work) == (1, True)
    scheduler.fail(1, "why")
    assert (scheduler.queued, scheduler.pending(1), scheduler.pending(2)) == (1, False, True)
    scheduler.fail(2, "why")
    assert (scheduler.queued, scheduler.has_work) == (0, False)


def test_q2_callbacks_may_call_the_scheduler() -> None:
    scheduler = scheduler_with(1, 4)
    heard: list[tuple[int, int]] = []

    def resubmit(future: Future[Any]) -> None:
        heard.append((scheduler.queued, scheduler.counts.submitted))
        if len(heard) < 5:
            scheduler.submit(D(len(heard) + 1, 1)).add_done_callback(resubmit)

    scheduler.submit(D(1, 1)).add_done_callback(resubmit)

    def settle() -> None:
        scheduler.get_work()
        scheduler.complete(1, [1])
        scheduler.fail(2, "why")
        scheduler.cancel_session(1)
        scheduler.clear()
        scheduler.fail_all("why")

    in_threads(settle)  # in a thread, so that a deadlock fails at the deadline
    assert len(heard) == 5


@pytest.mark.parametrize("attempt", [copy.copy, copy.deepcopy, pickle.dumps])
def test_q3_neither_copied_nor_pickled(attempt: Callable[[Scheduler], object]) -> None:
    with pytest.raises(TypeError, match="Scheduler cannot be copied or pickled"):
        attempt(Scheduler())


# Beyond the original


def test_x1_one_decode_or_consecutive_chunks_of_a_session_in_a_batch() -> None:
    scheduler = scheduler_with(
        4, 4, D(1, 1), D(2, 1), P(3, 1, 2), P(4, 1, 2), D(5, 1), P(6, 1, 2), D(7, 2), exclusive=True
    )
    assert batches(scheduler, 6) == [[1, 7], [2], [3, 4], [5], [6], []]


def test_x1_what_is_passed_over_keeps_its_place() -> None:
    scheduler = scheduler_with(2, 4, D(1, 1), D(2, 1), D(3, 2), D(4, 3), D(5, 4), exclusive=True)
    assert batches(scheduler, 3) == [[1, 3], [2, 4], [5]]
    scheduler = scheduler_with(1, 4, D(1, 1), P(2, 1, 4), P(3, 2, 4), P(4, 3, 4), P(5, 4, 4), exclusive=True)
    assert batches(scheduler, 2) == [[1, 3, 4], [2, 5]]


def test_x1_removing_a_head_lets_the_next_go() -> None:
    scheduler = scheduler_with(2, 4, P(1, 1, 4), D(2, 1), D(3, 1), exclusive=True)
    scheduler.fail(1, "why")
    scheduler.fail(2, "why")
    assert ids(scheduler.get_work()) == [3]


def test_x1_a_decode_that_could_not_go_before_keeps_its_place_by_arrival() -> None:
    scheduler = scheduler_with(1, 4, D(1, 1), D(2, 2), D(3, 3), D(4, 1), D(5, 4), D(6, 2), D(7, 4), exclusive=True)
    assert batches(scheduler, 4) == [[1], [2], [3], [4]]
    scheduler.submit(D(8, 5))
    assert batches(scheduler, 4) == [[5], [6], [7], [8]]
    scheduler = scheduler_with(1, 4, D(1, 1), D(2, 2), D(3, 3), D(4, 1), D(5, 4), exclusive=True)
    assert ids(scheduler.get_work()) == [1]
    for request_id in (2, 4):
        scheduler.fail(request_id, "why")
    assert batches(scheduler, 3) == [[3], [5], []]


def many(scheduler: Scheduler, requests: Iterable[Request]) -> list[Future[Any]]:
    return scheduler.submit_many(requests)


@pytest.mark.parametrize(
    ("bad", "names"),
    [(P(9, 1, 5), "request 9"), (P(9, 1, 0), "request 9"), (D(1, 1), "request 1"), (D(8, 1), "request 8")],
)
def test_x2_submit_many_is_all_or_nothing(bad: Request, names: str) -> None:
    scheduler = scheduler_with(1, 4, D(1, 1))
    before = scheduler.counts
    futures = scheduler.submit_many([P(8, 1, 4), bad, P(10, 1, 4)])
    assert len(futures) == 3
    assert all(names in rejection(future) for future in futures)
    assert scheduler.counts == before
    assert scheduler.submit_many([]) == []
    good = scheduler.submit_many(P(i, 1, 4) for i in (8, 9, 10))
    assert [future.done() for future in good] == [False] * 3
    assert batches(scheduler, 2) == [[1, 8, 9], [10]]


def test_x2_a_session_that_cannot_be_a_key_raises_and_nothing_is_queued() -> None:
    scheduler = Scheduler()
    unhashable: Any = []
    with pytest.raises(TypeError):
        scheduler.submit_many([D(1, 1), Request(2, unhashable, [1])])
    assert scheduler.counts.submitted == 0
    assert not scheduler.get_work()


def test_x3_cancel_session_hands_its_queued_steps_back() -> None:
    scheduler = scheduler_with(1, 4, D(1, 1))
    scheduler.get_work()
    requests = [D(2, 1), P(3, 1, 4), D(4, 2), P(5, 1, 2), P(6, 2, 2)]
    futures = {r.request_id: scheduler.submit(r) for r in requests}
    assert scheduler.cancel_session(1) == [requests[0], requests[1], requests[3]]
    assert [i for i, future in futures.items() if future.cancelled()] == [2, 3, 5]
    assert scheduler.pending(1)
    assert (scheduler.queued, scheduler.counts.cancelled) == (2, 3)
    assert scheduler.clear() == [requests[2], requests[4]]
    assert (scheduler.queued, scheduler.counts.cancelled, scheduler.counts.in_flight) == (0, 5, 1)


def test_x3_cancelling_a_future_takes_its_step_out() -> None:
    scheduler = scheduler_with(1, 4)
    futures = [scheduler.submit(D(i, 1)) for i in (1, 2, 3)]
    waiting: list[set[Future[Any]]] = []
    asked = threading.Event()

    def wait_for_two() -> None:
        asked.set()
        waiting.append(wait(futures[1:2], DEADLINE, FIRST_COMPLETED).done)

    def cancel() -> None:
        assert asked.wait(DEADLINE)
        assert futures[1].cancel()

    in_threads(wait_for_two, cancel)
    assert waiting == [{futures[1]}]
    assert futures[1].cancel()
    assert batches(scheduler, 2) == [[1], [3]]
    assert futures[0].running()
    assert not futures[0].cancel()
    assert scheduler.complete(1, [1])
    assert not futures[0].cancel()
    assert scheduler.counts.cancelled == 1


def test_x4_a_step_put_back_sends_the_head_of_its_exclusive_session_back_to_waiting() -> None:
    scheduler = scheduler_with(4, 4, D(1, 1), D(2, 1), P(3, 2, 4), D(4, 2), exclusive=True)
    assert ids(scheduler.get_work()) == [1, 3]
    assert scheduler.requeue(1)
    assert scheduler.requeue(3)
    assert batches(scheduler, 2) == [[1, 3], [2, 4]]


@pytest.mark.parametrize("exclusive", [False, True])
def test_x4_requeue_goes_to_the_front(exclusive: bool) -> None:
    scheduler = scheduler_with(1, 4, D(1, 1), P(2, 2, 4), P(3, 2, 4), exclusive=exclusive)
    assert ids(scheduler.get_work()) == [1, 2, 3]
    for request in (D(4, 4), D(5, 1), P(6, 2, 4)):
        scheduler.submit(request)
    assert [scheduler.requeue(i) for i in (3, 2, 1)] == [True] * 3
    counts = scheduler.counts
    assert (counts.submitted, counts.queued, counts.in_flight) == (6, 6, 0)
    assert not scheduler.requeue(2)
    assert not scheduler.requeue(99)
    assert batches(scheduler, 3) == [[1, 2, 3], [4, 6], [5]]

"""Generations over real processes: their tokens, how they end, and where the session stands afterwards."""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import shmsched
from shmsched.client.generation import EngineDraft, FinishReason, Generation, PromptLookup

from processes.engines import FAIL
from processes.expected import VOCAB, echoes, prompt_that_meets
from processes.leftovers import wait_until
from processes.ways import DEADLINE, ENGINES, way_of


@way_of
@pytest.mark.parametrize("n_prompt", [1, 16, 100])
def test_each_token_follows_from_the_last(session: shmsched.Session, way: dict[str, Any], n_prompt: int) -> None:
    prompt = list(range(n_prompt))
    generation = session.generate(prompt, max_new_tokens=12, **way)
    assert generation.finish_reason is None
    assert list(generation) == generation.tokens == echoes(prompt, 12)
    assert generation.finish_reason is FinishReason.LENGTH
    assert session.position == n_prompt + 11, "the last token is not fed"
    assert session.history.tolist() == prompt + generation.tokens[:-1]
    assert session.unfed == generation.tokens[-1]
    assert list(generation) == [], "it has ended"


@way_of
def test_a_second_generation_goes_on_where_the_session_stands(session: shmsched.Session, way: dict[str, Any]) -> None:
    first = list(session.generate([1, 2, 3], max_new_tokens=5, **way))
    second = list(session.generate([], max_new_tokens=5, **way))
    assert first + second == echoes([1, 2, 3], 10)
    third = list(session.generate([7, 8], max_new_tokens=5, **way))
    assert third == echoes([1, 2, 3, *first, *second, 7, 8], 5)


@way_of
def test_it_ends_before_a_stop_token_which_is_fed_first_later(session: shmsched.Session, way: dict[str, Any]) -> None:
    expected = echoes([5], 8)
    generation = session.generate([5], max_new_tokens=10, stop_tokens={expected[4]}, **way)
    assert list(generation) == expected[:4]
    assert generation.finish_reason is FinishReason.STOP
    assert session.unfed == expected[4]
    assert list(session.generate([], max_new_tokens=3, **way)) == expected[5:]


def test_more_stop_tokens_than_the_scheduler_takes_end_it_too(session: shmsched.Session) -> None:
    expected = echoes([5], 8)
    stops = [expected[4], *(t for t in range(100) if t not in expected)][:40]
    assert list(session.generate([5], max_new_tokens=10, stop_tokens=stops)) == expected[:4]


@way_of
def test_it_ends_when_the_session_is_full(session: shmsched.Session, way: dict[str, Any]) -> None:
    most = session.model.max_session_tokens
    prompt = [i % 7 for i in range(most - 5)]
    generation = session.generate(prompt, max_new_tokens=100, **way)
    assert list(generation) == echoes(prompt, 6)
    assert generation.finish_reason is FinishReason.LENGTH
    assert session.position == most
    with pytest.raises(shmsched.InvalidRequest, match="3001"):
        session.generate([], max_new_tokens=1, **way)


@way_of
def test_leaving_the_loop_cancels_and_the_session_can_be_used(session: shmsched.Session, way: dict[str, Any]) -> None:
    expected = echoes([1, 2, 3], 40)
    generation = session.generate([1, 2, 3], max_new_tokens=2000, **way)
    for n, token in enumerate(generation, 1):
        assert token == expected[n - 1]
        if n == 4:
            break
    assert generation.finish_reason is FinishReason.CANCELLED
    assert generation.tokens == expected[:4]
    assert (session.position, session.unfed) == (6, expected[3])
    with pytest.raises(ZeroDivisionError):
        for _ in session.generate([], max_new_tokens=2000, **way):
            1 / 0  # noqa: B018
    assert (session.position, session.unfed) == (7, expected[4])
    with session.generate([], max_new_tokens=2000, **way) as generation:
        assert [next(generation), next(generation)] == expected[5:7]
    assert generation.finish_reason is FinishReason.CANCELLED
    generation.close()
    assert list(session.generate([], max_new_tokens=3, **way)) == expected[7:10]
    assert session.submit([9]).result(DEADLINE).tokens.tolist() == echoes([1, 2, 3, *expected[:9], 9], 1)
    assert session.unfed is None, "nobody knows whether it still follows"


@way_of
def test_closing_before_the_first_token_leaves_no_trace(session: shmsched.Session, way: dict[str, Any]) -> None:
    session.generate(list(range(50)), max_new_tokens=5, **way).close()
    assert (session.position, session.unfed) == (0, None)
    assert list(session.generate([3, 4], max_new_tokens=3, **way)) == echoes([3, 4], 3)


@way_of
def test_closing_when_all_has_come_leaves_what_was_not_taken_undone(
    cluster: shmsched.Cluster, session: shmsched.Session, way: dict[str, Any]
) -> None:
    expected = echoes([1, 2], 10)
    generation = session.generate([1, 2], max_new_tokens=6, **way)
    first = next(generation)

    def idle() -> bool:
        ledger = cluster.status()["ledger"]
        return bool(ledger["queued"] == ledger["in_flight"] == 0)

    wait_until(idle, "all steps to have run")
    generation.close()
    assert generation.tokens == [first]
    assert (session.position, session.unfed) == (2, first)
    assert session.history.tolist() == [1, 2]
    assert list(session.generate([], max_new_tokens=4, **way)) == expected[1:5]


@pytest.mark.parametrize("continuation", [True, False])
def test_what_is_left_is_cancelled_within_one_step(continuation: bool) -> None:
    with (
        shmsched.launch(f"echo?vocab={VOCAB}&step_us=20000") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        for n, _ in enumerate(session.generate([1], max_new_tokens=1000, continuation=continuation), 1):
            if n == 3:
                break

        def idle() -> bool:
            ledger = cluster.status()["ledger"]
            return bool(ledger["queued"] == ledger["in_flight"] == 0)

        wait_until(idle, "nothing of it to be left")
        ledger = cluster.status()["ledger"]
        assert ledger["balanced"]
        # The one that ran as it was left may count as completed or as cancelled.
        assert ledger["submitted"] <= 5


def test_a_generation_that_nobody_refers_to_is_cancelled(session: shmsched.Session) -> None:
    generation = session.generate([1, 2], max_new_tokens=2000)
    first = next(generation)
    del generation
    gc.collect()
    assert (session.position, session.unfed) == (2, first)
    # In a cycle, only the collector finds it.
    holder: list[Any] = [session.generate([], max_new_tokens=2000)]
    holder.append(holder)
    next(holder[0])
    del holder
    gc.collect()
    wait_until(lambda: session.unfed is not None, "the collected generation to be cancelled")
    assert session.position == 3


def test_a_generation_that_is_collected_under_the_clients_lock_waits_for_nobody(session: shmsched.Session) -> None:
    """A finalizer runs anywhere: in a thread that holds the very lock that cancelling takes."""
    generation = session.generate([1, 2], max_new_tokens=2000)
    next(generation)
    with session._client._channel.lock:
        del generation
    wait_until(lambda: session.unfed is not None, "the collected generation to be cancelled")
    assert session.position == 2


@way_of
def test_the_next_step_runs_while_the_caller_deals_with_a_token(
    cluster: shmsched.Cluster, session: shmsched.Session, way: dict[str, Any]
) -> None:
    before = cluster.status()["ledger"]["completed"]
    for n, _ in enumerate(session.generate([1], max_new_tokens=4, **way), 1):
        steps = min(n + 1, 4)
        wait_until(lambda: cluster.status()["ledger"]["completed"] - before >= steps, f"{steps} steps to have run")  # noqa: B023


@way_of
def test_timings(session: shmsched.Session, way: dict[str, Any]) -> None:
    began = time.monotonic()
    generation = session.generate([1], max_new_tokens=8, **way)
    assert generation.timings == shmsched.client.generation.Timings(None, None, None, None)
    list(generation)
    took = time.monotonic() - began
    timings = generation.timings
    assert timings.time_to_first_token is not None
    assert timings.inter_token_mean is not None
    assert timings.inter_token_max is not None
    assert timings.queue_wait is not None
    assert 0 < timings.inter_token_mean <= timings.inter_token_max
    assert math.isclose(timings.time_to_first_token + 7 * timings.inter_token_mean, took, abs_tol=0.2)
    # A caller who takes its time changes nothing in when tokens came.
    generation = session.generate([], max_new_tokens=3, continuation=True)
    time.sleep(0.2)
    list(generation)
    assert generation.timings.time_to_first_token is not None
    assert generation.timings.time_to_first_token < 0.19


@pytest.mark.parametrize("continuation", [True, False])
def test_a_failed_step_ends_it_with_its_error_and_the_session_goes_on(continuation: bool) -> None:
    with (
        shmsched.launch(f"{ENGINES}:Moody?vocab={VOCAB}") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        prompt, expected = prompt_that_meets(FAIL, avoiding=range(100, 109))
        n = expected.index(FAIL) + 1
        generation = session.generate(prompt, max_new_tokens=50, continuation=continuation)
        with pytest.raises(shmsched.StepFailed, match="told to fail"):
            list(generation)
        assert generation.finish_reason is FinishReason.FAILED
        assert isinstance(generation.error, shmsched.StepFailed)
        assert generation.tokens == expected[: len(generation.tokens)]
        assert len(generation.tokens) in (n, n - 1)
        assert (session.position, session.unfed) == (len(generation.tokens) + 1, generation.tokens[-1])


def test_a_deadline_ends_it(session: shmsched.Session) -> None:
    generation = session.generate([1], max_new_tokens=3000, deadline=time.monotonic() + 0.1, continuation=False)
    with pytest.raises(shmsched.DeadlineExceeded):
        list(generation)
    assert generation.finish_reason is FinishReason.FAILED
    assert session.unfed == generation.tokens[-1]


def test_an_interrupt_while_it_waits_cancels_it() -> None:
    with (
        shmsched.launch(f"echo?vocab={VOCAB}&step_us=300000") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        generation = session.generate([1], max_new_tokens=1000)
        first = next(generation)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            next(generation)
        assert generation.finish_reason is FinishReason.CANCELLED
        assert (session.position, session.unfed) == (1, first)


# --- engines that cannot rewind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("continuation", [True, False])
def test_what_an_engine_that_cannot_rewind_has_run_counts_as_given(continuation: bool) -> None:
    with (
        shmsched.launch(f"{ENGINES}:Rigid?vocab={VOCAB}&step_us=2000") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        expected = echoes([1, 2], 200)
        generation = session.generate([1, 2], max_new_tokens=150, continuation=continuation)
        for n, _ in enumerate(generation, 1):
            if n == 3:
                break
        kept = generation.tokens
        assert kept == expected[: len(kept)]
        assert 3 <= len(kept) < 100
        assert session.history.tolist() == [1, 2, *kept[:-1]]
        assert session.unfed == kept[-1]
        assert list(session.generate([], max_new_tokens=5)) == expected[len(kept) : len(kept) + 5]
        with pytest.raises(shmsched.Unsupported, match="cannot rewind"):
            session.generate([], max_new_tokens=5, draft=PromptLookup())
        with pytest.raises(shmsched.Unsupported, match="so it cannot draft"):
            EngineDraft(session)


@pytest.mark.parametrize(
    ("prompt", "how", "message"),
    [
        ([], {}, "tokens are empty"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([1], {"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ([1], {"sampling": None}, "sampling is None; a SamplingParams is wanted"),
        ([1], {"stop_tokens": [VOCAB]}, "token 1000 is outside"),
        ([1], {"on_session_lost": "ignore"}, "on_session_lost is 'ignore'"),
        ([VOCAB], {}, "token 1000 is outside"),
    ],
)
def test_what_can_never_be_done_is_refused_at_the_call(
    session: shmsched.Session, prompt: list[int], how: dict[str, Any], message: str
) -> None:
    with pytest.raises(shmsched.InvalidRequest, match=message):
        session.generate(prompt, **{"max_new_tokens": 5, **how})
    assert list(session.generate([1], max_new_tokens=2)) == echoes([1], 2)


def test_a_generation_is_shown_as_it_stands(session: shmsched.Session) -> None:
    generation = session.generate([1], max_new_tokens=2)
    assert repr(generation) == "<Generation of 'echo', 0 tokens, running>"
    list(generation)
    assert repr(generation) == "<Generation of 'echo', 2 tokens, length>"
    assert isinstance(generation, Generation)


def test_a_child_process_leaves_its_parents_generation_alone(session: shmsched.Session) -> None:
    generation = session.generate([1], max_new_tokens=500)
    tokens = [next(generation)]
    child = os.fork()
    if child == 0:
        generation.close()
        del generation
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tokens + list(generation) == echoes([1], 500)


@way_of
def test_a_second_generation_is_refused_until_the_first_has_ended(
    session: shmsched.Session, way: dict[str, Any]
) -> None:
    """Whatever has come meanwhile: what the caller was not given yet is sampled, and the session goes on behind it."""
    first = session.generate([1, 2, 3], max_new_tokens=4, **way)
    given = [next(first)]
    stands_still: list[int] = []

    def still() -> bool:
        stands_still.append(session.position)
        return len(stands_still) > 20 and len(set(stands_still[-20:])) == 1

    wait_until(still, "all to come that comes by itself")
    for go_on in (lambda: session.generate([9], max_new_tokens=2), lambda: session.submit([9])):
        with pytest.raises(shmsched.InvalidRequest, match=r"session \d+ is generating; close that generation"):
            go_on()
    given += first
    assert given == echoes([1, 2, 3], 4)
    second = session.generate([9], max_new_tokens=2, **way)
    assert list(second) == echoes([1, 2, 3, *given, 9], 2)


@way_of
def test_who_has_all_tokens_may_go_on_without_asking_for_one_more(
    session: shmsched.Session, way: dict[str, Any]
) -> None:
    first = session.generate([1, 2, 3], max_new_tokens=4, **way)
    given = [next(first) for _ in range(4)]
    assert list(session.generate([], max_new_tokens=2, **way)) == echoes([1, 2, 3, *given], 2)
    assert list(first) == []
    first.close()
    assert session.submit([5]).result(DEADLINE).tokens.tolist() == echoes(session.history.tolist(), 1)


def test_a_session_that_stands_for_a_new_one_has_nothing_left_to_feed(session: shmsched.Session) -> None:
    list(session.generate([1], max_new_tokens=2))
    assert session.unfed is not None
    session.reopen()
    assert list(session.generate([7], max_new_tokens=3)) == echoes([7], 3)


@pytest.mark.usefixtures("interruptible")
def test_interrupts_at_any_moment_leave_the_session_free_and_what_it_holds_known(client: shmsched.Client) -> None:
    inside = threading.Event()
    over = threading.Event()

    def interrupt() -> None:
        while not over.is_set():
            if inside.wait(0.1):
                time.sleep(random.random() * 0.003)
                if inside.is_set():
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                    inside.clear()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    interrupted = 0
    try:
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            with client.open_session(model="echo") as session:
                generation: Generation | None = None
                try:
                    inside.set()
                    generation = session.generate([1, 2, 3], max_new_tokens=100)
                    list(generation)
                    inside.clear()
                    time.sleep(0.01)
                except KeyboardInterrupt:
                    interrupted += 1
                inside.clear()
                if generation is not None:
                    generation.close()
                for _ in range(2):
                    token = int(session.submit([5]).result(DEADLINE).tokens[0])
                    assert [token] == echoes(session.history.tolist(), 1)
    finally:
        over.set()
        interrupter.join(DEADLINE)
        signal.signal(signal.SIGINT, before)
    assert interrupted > 20


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"stop_tokens": 5}, "stop_tokens is 5"),
        ({"logits_processor": 5}, "logits_processor is 5"),
        ({"draft": 5}, "draft is 5"),
    ],
)
def test_what_is_of_the_wrong_kind_is_named(session: shmsched.Session, wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(shmsched.InvalidRequest, match=named):
        session.generate([1], max_new_tokens=1, **wrong)
    assert list(session.generate([1], max_new_tokens=np.int64(2), stop_tokens=np.array([1, 2]))) == echoes([1], 2)

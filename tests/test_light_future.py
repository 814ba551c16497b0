"""The future that is light until somebody waits: it does what ``Future`` does, whoever comes first."""

from __future__ import annotations

import asyncio
import copy
import itertools
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import (
    CancelledError,
    Future,
    InvalidStateError,
    ThreadPoolExecutor,
    as_completed,
    wait,
)
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmsched import futures
from shmsched.futures import LightFuture

DEADLINE = 30.0
RACES = 300
BLOCKED = 0.01
"""Seconds after which another thread that has not ended waits for a lock."""
ALONE = {"_state", "_result", "_exception"}


@pytest.fixture
def racers() -> Iterator[Callable[..., list[Any]]]:
    """Runs jobs at the same moment, each in a thread, and returns what each returned or raised."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:

            def race(*jobs: Callable[[], Any]) -> list[Any]:
                barrier = threading.Barrier(len(jobs), timeout=DEADLINE)

                def run(job: Callable[[], Any]) -> Any:
                    barrier.wait()
                    return job()

                return [started.result(DEADLINE) for started in [pool.submit(run, job) for job in jobs]]

            yield race
    finally:
        sys.setswitchinterval(interval)


def called_back(future: Future[int]) -> list[Future[int]]:
    calls: list[Future[int]] = []
    called = threading.Event()
    future.add_done_callback(lambda f: (calls.append(f), called.set()))
    assert called.wait(DEADLINE)
    return calls


def test_future_has_no_attribute_that_is_not_known_here() -> None:
    """Python's next version may add one; then LightFuture must provide it."""
    assert set(vars(Future())) == ALONE | {"_condition", "_waiters", "_done_callbacks"}


def test_nothing_is_made_for_a_future_that_nobody_waits_for() -> None:
    answered: LightFuture[int] = LightFuture()
    answered.set_result(5)
    failed: LightFuture[int] = LightFuture()
    failed.set_exception(KeyError("no"))
    assert (answered.done(), answered.result(), answered.exception()) == (True, 5, None)
    assert isinstance(failed.exception(), KeyError)
    assert set(vars(answered)) | set(vars(failed)) <= ALONE


OPERATIONS: dict[str, Callable[[Future[int]], Any]] = {
    "set_result": lambda f: f.set_result(1),
    "set_exception": lambda f: f.set_exception(KeyError("no")),
    "cancel": lambda f: f.cancel(),
    "run": lambda f: f.set_running_or_notify_cancel(),
    "result": lambda f: f.result(timeout=0),
    "exception": lambda f: repr(f.exception(timeout=0)),
    "done": lambda f: (f.done(), f.running(), f.cancelled()),
    "wait": lambda f: [len(futures) for futures in wait([f], timeout=0)],
    "as_completed": lambda f: len(list(as_completed([f], timeout=0))),
    "repr": lambda f: repr(f).partition("state=")[2],
}


@given(st.lists(st.sampled_from([*OPERATIONS, "add_done_callback"]), max_size=8))
@settings(max_examples=300, deadline=None)
def test_alone_it_does_what_future_does(names: list[str]) -> None:
    def story(future: Future[int]) -> list[Any]:
        told: list[Any] = []
        for i, name in enumerate(names):
            try:
                if name == "add_done_callback":
                    future.add_done_callback(lambda f, i=i: told.append((i, f is future, f.done())))  # type: ignore[misc]
                else:
                    told.append(OPERATIONS[name](future))
            except Exception as error:
                told.append(type(error))
        return told

    assert story(LightFuture()) == story(Future())


COMERS: dict[str, Callable[[Future[int]], Any]] = {
    "result": lambda f: f.result(DEADLINE),
    "exception": lambda f: f.exception(DEADLINE),
    "wait": lambda f: wait([f], DEADLINE).done == {f},
    "as_completed": lambda f: list(as_completed([f], DEADLINE)) == [f],
    "add_done_callback": lambda f: called_back(f) == [f],
}
SEEN = {"result": 7, "exception": None, "wait": True, "as_completed": True, "add_done_callback": True}


class Interrupted:
    """Runs ``first``, and ``second`` in another thread when ``first`` has come to a certain line of ours."""

    def __init__(self, first: Callable[[], Any], line: int, second: Callable[[], Any]) -> None:
        self.lines_left = line
        self.go, self.over = threading.Event(), threading.Event()
        self.reached = False
        """Whether ``first`` has so many lines before it ends or waits."""
        self.outcomes: list[Any] = [None, None]
        thread = threading.Thread(target=self.run_second, args=(second,), daemon=True)
        thread.start()
        sys.settrace(self.trace)
        try:
            self.outcomes[0] = outcome(first)
        finally:
            sys.settrace(None)
        self.go.set()
        thread.join(DEADLINE)
        assert not thread.is_alive(), f"{second} was not answered"

    def run_second(self, second: Callable[[], Any]) -> None:
        self.go.wait(10 * BLOCKED)
        self.outcomes[1] = outcome(second)
        self.over.set()

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != futures.__file__:
            return None
        if event == "line":
            self.lines_left -= 1
            if self.lines_left == 0 and not self.over.is_set():
                self.reached = True
                self.go.set()
                self.over.wait(BLOCKED)
        return self.trace


def outcome(job: Callable[[], Any]) -> Any:
    try:
        return job()
    except (InvalidStateError, CancelledError) as error:
        return type(error)


def interruptions(
    first: Callable[[Future[int]], Any], second: Callable[[Future[int]], Any], prepare: Callable[[Future[int]], Any]
) -> Iterator[tuple[Future[int], list[Any]]]:
    """At each of the first one's lines in turn: a future of which both are over, and what they returned."""
    for line in itertools.count(1):
        future: LightFuture[int] = LightFuture()
        prepare(future)
        alone = not future._in_company
        run = Interrupted(lambda: first(future), line, lambda: second(future))  # noqa: B023
        yield future, run.outcomes
        if not run.reached:
            assert line > 2 or not alone
            return


def settle(future: Future[int]) -> None:
    future.set_result(7)


def nothing(future: Future[int]) -> None:
    pass


@pytest.mark.parametrize("comer", COMERS)
def test_who_comes_at_any_moment_of_the_settling_is_answered(comer: str) -> None:
    for _, outcomes in interruptions(settle, COMERS[comer], nothing):
        assert outcomes == [None, SEEN[comer]]


@pytest.mark.parametrize("comer", COMERS)
def test_who_is_settled_at_any_moment_of_coming_is_answered(comer: str) -> None:
    for _, outcomes in interruptions(COMERS[comer], settle, nothing):
        assert outcomes == [SEEN[comer], None]


@pytest.mark.parametrize("second", ["wait", "add_done_callback"])
@pytest.mark.parametrize("first", ["result", "as_completed", "add_done_callback"])
def test_two_who_come_at_the_same_moment_are_answered(first: str, second: str) -> None:
    timers: list[threading.Timer] = []

    def settle_soon(future: Future[int]) -> None:
        timers.append(threading.Timer(2 * BLOCKED, settle, [future]))
        timers[-1].start()

    for _, outcomes in interruptions(COMERS[first], COMERS[second], settle_soon):
        assert outcomes == [SEEN[first], SEEN[second]]
    for timer in timers:
        timer.join(DEADLINE)


ENDS: dict[str, tuple[Callable[[Future[int]], Any], object, Callable[[Future[int]], bool]]] = {
    "answered": (settle, None, lambda f: not f.cancelled() and f.exception(0) is None and f.result(0) == 7),
    "failed": (lambda f: f.set_exception(KeyError("no")), None, lambda f: not f.cancelled() and bool(f.exception(0))),
    "cancelled": (lambda f: f.cancel(), True, lambda f: f.cancelled()),
}


@pytest.mark.parametrize("waited_for", [False, True])
@pytest.mark.parametrize(("first", "second"), list(itertools.product(ENDS, ENDS)))
def test_it_is_settled_once_whoever_is_first(first: str, second: str, waited_for: bool) -> None:
    calls: list[Future[int]] = []

    def prepare(future: Future[int]) -> None:
        calls.clear()
        if waited_for:
            future.add_done_callback(calls.append)

    ends = ENDS[first], ENDS[second]
    for future, outcomes in interruptions(ends[0][0], ends[1][0], prepare):
        won = [got == wins for got, (_, wins, _) in zip(outcomes, ends, strict=True)]
        if first == second == "cancelled":
            assert won == [True, True]
        else:
            assert sum(won) == 1, outcomes
        assert ends[won.index(True)][2](future)
        assert calls == [future] * waited_for


def test_all_who_come_share_one_condition(racers: Callable[..., list[Any]]) -> None:
    for _ in range(RACES):
        future: LightFuture[int] = LightFuture()
        callbacks: list[int] = []
        racers(
            lambda f=future: f.set_result(7),
            lambda f=future: f.result(DEADLINE),
            lambda f=future, c=callbacks: f.add_done_callback(lambda _: c.append(1)),
            lambda f=future, c=callbacks: f.add_done_callback(lambda _: c.append(2)),
        )
        assert sorted(callbacks) == [1, 2]


def test_waiting_for_many_returns_when_all_are_settled(racers: Callable[..., list[Any]]) -> None:
    for _ in range(RACES // 4):
        futures: list[LightFuture[int]] = [LightFuture() for _ in range(8)]

        def settle(some: list[LightFuture[int]]) -> None:
            for future in some:
                future.set_result(7)

        def wait_for_all(fs: list[LightFuture[int]] = futures) -> bool:
            return wait(fs, DEADLINE).done == set(fs) and all(f.done() for f in fs)

        halves = futures[::2], futures[1::2]
        assert racers(lambda h=halves: settle(h[0]), lambda h=halves: settle(h[1]), wait_for_all, wait_for_all) == [
            None,
            None,
            True,
            True,
        ]


def test_asyncio_waits_for_it() -> None:
    async def main() -> int:
        future: LightFuture[int] = LightFuture()
        timer = threading.Timer(0.01, future.set_result, [7])
        timer.start()
        answer = await asyncio.wait_for(asyncio.wrap_future(future), DEADLINE)
        timer.join(DEADLINE)
        return answer

    assert asyncio.run(main()) == 7


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(settled: bool, take: Callable[[Any], Any]) -> None:
    future: LightFuture[int] = LightFuture()
    if settled:
        future.set_result(7)
    with pytest.raises(TypeError, match="pickled or copied"):
        take(future)


def test_a_forked_child_does_not_wait_for_the_parents_lock() -> None:
    program = """
        import os, signal, threading
        from shmsched import futures

        held, over = threading.Event(), threading.Event()

        def hold():
            with futures._lock:
                held.set()
                over.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(30)
        child = os.fork()
        if child == 0:
            future = futures.LightFuture()
            signal.alarm(10)
            future.set_result(7)
            future.add_done_callback(lambda f: os._exit(0))
        _, status = os.waitpid(child, 0)
        over.set()
        thread.join(30)
        print(os.waitstatus_to_exitcode(status))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("0\n", "")

"""The event loop: readiness, timers in order and on time, work from other threads."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from shmsched.daemon.clock import Clock
from shmsched.daemon.loop import READ, WRITE, EventLoop

DEADLINE_S = 10.0


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    # A loop that nothing stops must not hang the run.
    loop.call_at(time.monotonic() + DEADLINE_S, loop.stop)
    yield loop
    loop.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe2(os.O_NONBLOCK)
    yield read, write
    for fd in (read, write):
        try:
            os.close(fd)
        except OSError:
            pass


def stopped_in_time(loop: EventLoop) -> bool:
    began = time.monotonic()
    loop.run()
    return time.monotonic() - began < DEADLINE_S - 1


def test_timers_fire_in_order_and_not_early(loop: EventLoop) -> None:
    began = time.monotonic()
    fired: list[tuple[str, float]] = []
    for name, delay in (("c", 0.03), ("a", 0.0), ("d", 0.05), ("b", 0.002), ("b2", 0.002)):
        loop.call_at(
            began + delay, lambda name=name, delay=delay: fired.append((name, time.monotonic() - began - delay))
        )  # type: ignore[misc]
    loop.call_at(began + 0.06, loop.stop)
    assert stopped_in_time(loop)
    assert [name for name, _ in fired] == ["a", "b", "b2", "c", "d"]
    assert all(late >= 0 for _, late in fired)


def test_a_short_timer_is_finer_than_a_millisecond(loop: EventLoop) -> None:
    """epoll alone would round up: lingering for 200 us would cost a millisecond. The best of many, since we share the machine."""
    late: list[float] = []

    def again(when: float) -> None:
        late.append(time.monotonic() - when)
        if len(late) == 100:
            loop.stop()
            return
        following = time.monotonic() + 0.0002
        loop.call_at(following, lambda: again(following))

    again(time.monotonic())
    assert stopped_in_time(loop)
    assert min(late[1:]) < 0.0004


def test_a_cancelled_timer_does_not_fire_nor_wake_the_loop(loop: EventLoop) -> None:
    fired: list[str] = []
    turns: list[int] = []
    loop.after_turn = lambda: turns.append(1)
    timers = [loop.call_at(time.monotonic() + 0.01 + i / 1e5, lambda: fired.append("no")) for i in range(500)]
    for timer in timers:
        timer.cancel()
        timer.cancel()
    loop.call_at(time.monotonic() + 0.03, loop.stop)
    assert stopped_in_time(loop)
    assert fired == []
    assert len(turns) <= 3


def test_cancelling_a_timer_that_has_fired_does_nothing(loop: EventLoop) -> None:
    fired: list[int] = []
    timer = loop.call_at(time.monotonic(), lambda: fired.append(1))
    loop.call_at(time.monotonic() + 0.001, timer.cancel)
    loop.call_at(time.monotonic() + 0.002, loop.stop)
    assert stopped_in_time(loop)
    timer.fire()
    assert fired == [1]


def test_a_timer_set_by_a_timer(loop: EventLoop) -> None:
    loop.call_at(time.monotonic(), lambda: loop.call_at(time.monotonic(), loop.stop))
    assert stopped_in_time(loop)


def test_readiness_is_told_until_it_is_unwatched(loop: EventLoop, pipe: tuple[int, int]) -> None:
    read, write = pipe
    got: list[bytes] = []

    def ready(events: int) -> None:
        assert events & READ
        got.append(os.read(read, 1))
        if len(got) == 3:
            loop.unwatch(read)
            loop.call_at(time.monotonic() + 0.01, loop.stop)

    loop.watch(read, READ, ready)
    os.write(write, b"abcdef")
    assert stopped_in_time(loop)
    assert got == [b"a", b"b", b"c"]


def test_what_is_asked_of_a_descriptor_can_be_changed(loop: EventLoop) -> None:
    here, there = socket.socketpair()
    with here, there:
        seen: list[int] = []

        def ready(events: int) -> None:
            seen.append(events)
            if events & WRITE:
                loop.change(here.fileno(), READ)
                there.send(b"x")
            else:
                loop.stop()

        loop.watch(here.fileno(), READ | WRITE, ready)
        assert stopped_in_time(loop)
        loop.unwatch(here.fileno())
    assert [bool(events & WRITE) for events in seen] == [True, False]


def test_a_callback_may_unwatch_what_a_later_one_of_the_same_round_was_for(loop: EventLoop) -> None:
    """The peer that the first one dropped must not be called any more."""
    pipes = [os.pipe() for _ in range(2)]
    called: list[int] = []

    def ready(fd: int) -> None:
        called.append(fd)
        for read, _ in pipes:
            loop.unwatch(read)
        loop.stop()

    for read, write in pipes:
        os.write(write, b"x")
        loop.watch(read, READ, lambda _, fd=read: ready(fd))  # type: ignore[misc]
    assert stopped_in_time(loop)
    assert len(called) == 1
    for ends in pipes:
        for fd in ends:
            os.close(fd)


def test_work_from_other_threads_runs_in_the_loop_s_thread_once_each_in_order(loop: EventLoop) -> None:
    ran: dict[int, list[int]] = {i: [] for i in range(4)}
    threads_seen: set[int] = set()

    def work(i: int, j: int) -> None:
        threads_seen.add(threading.get_ident())
        ran[i].append(j)
        if sum(map(len, ran.values())) == 4 * 300:
            loop.stop()

    def post(i: int) -> None:
        for j in range(300):
            loop.post(lambda i=i, j=j: work(i, j))  # type: ignore[misc]

    threads = [threading.Thread(target=post, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    assert stopped_in_time(loop)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert all(numbers == list(range(300)) for numbers in ran.values())
    assert threads_seen == {threading.get_ident()}


def test_a_post_wakes_a_loop_that_has_nothing_to_do() -> None:
    loop = EventLoop()
    thread = threading.Thread(target=loop.run)
    thread.start()
    loop.post(loop.stop)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    loop.close()


def test_the_turn_s_end_comes_after_all_of_its_callbacks(loop: EventLoop) -> None:
    events: list[str] = []
    loop.after_turn = lambda: events.append("turn")
    now = time.monotonic()
    for name in "abc":
        loop.call_at(now, lambda name=name: events.append(name))  # type: ignore[misc]
    loop.call_at(now, loop.stop)
    assert stopped_in_time(loop)
    assert events == ["a", "b", "c", "turn"]


def test_an_idle_loop_costs_nothing(loop: EventLoop, pipe: tuple[int, int]) -> None:
    loop.watch(pipe[0], READ, lambda _: None)
    turns: list[int] = []
    loop.after_turn = lambda: turns.append(1)
    loop.call_at(time.monotonic() + 0.3, loop.stop)
    before = resource.getrusage(resource.RUSAGE_THREAD)
    assert stopped_in_time(loop)
    after = resource.getrusage(resource.RUSAGE_THREAD)
    assert len(turns) <= 3
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.05


def test_timers_wait_for_time_in_which_the_process_runs() -> None:
    """A pause in the middle of a wait, and one in the middle of a callback."""
    jumped = [0.0]
    loop = EventLoop(Clock(lambda: time.monotonic() + jumped[0]))
    fired: list[str] = []

    def pause() -> None:
        jumped[0] += 1000.0

    began = time.monotonic()
    threading.Timer(0.05, pause).start()
    loop.call_later(0.01, pause)
    loop.call_later(DEADLINE_S, lambda: fired.append("a pause counted"))
    loop.call_later(0.3, loop.stop)
    loop.run()
    assert not fired
    assert 0.2 < time.monotonic() - began < DEADLINE_S
    assert loop.clock.now() < began + DEADLINE_S
    loop.close()

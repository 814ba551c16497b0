"""The daemon stops while there is work of all kinds: what was finished counts, and everything else ends with SchedulerStopped."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait

import pytest

import shmsched
from shmsched.workers.echo import advance, answer

from processes.leftovers import wait_until

VOCAB = 1000
DEADLINE = 30.0
AT_ONCE_S = 10.0
"""Less than what it would wait for, 30 s or more, on however busy a machine."""


@pytest.fixture
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(f"echo?vocab={VOCAB}&step_us=20000&max_sessions=8", drain_timeout_s=DEADLINE) as cluster:
        yield cluster


class Everything:
    """Steps, a generation, a session that waits to be opened, and an asyncio client with the same: none will end by itself."""

    def __init__(self, cluster: shmsched.Cluster) -> None:
        self._cluster = cluster
        self.client = cluster.client()
        self.sessions = sessions = [self.client.open_session() for _ in range(6)]
        self._ready = threading.Event()
        self.awaited: list[object] = []
        self.thread = threading.Thread(target=lambda: asyncio.run(self._wait()), name="asynchronous")
        self.thread.start()
        assert self._ready.wait(DEADLINE), "the asynchronous client did not come to wait"
        self.futures = [sessions[0].submit([t % VOCAB]) for t in range(3000)]
        self.stream = sessions[1].stream([1], further=50_000)
        self.opening = threading.Thread(target=self._open, name="opening")
        self.opening.start()
        wait_until(lambda: cluster.status()["waiting_sessions"] == 1, "a session to wait")

    def _open(self) -> None:
        try:
            self.client.open_session()
        except shmsched.ShmschedError as e:
            self.refusal = e

    async def _wait(self) -> None:
        async with shmsched.AsyncClient(socket=self._cluster.socket) as client:
            sessions = [await client.open_session() for _ in range(2)]
            stream = await sessions[0].stream([1], further=50_000)

            async def read() -> None:
                while True:
                    await stream.next()

            async def decode() -> None:
                while True:
                    await sessions[1].submit([1])

            await stream.next()
            tasks = [asyncio.ensure_future(read()), asyncio.ensure_future(decode())]
            self._ready.set()
            self.awaited = list(await asyncio.gather(*tasks, return_exceptions=True))

    def check(self, seconds: float) -> None:
        """All of it ends within so many seconds, rightly or with SchedulerStopped."""
        deadline = time.monotonic() + seconds
        assert not wait(self.futures, seconds).not_done, "futures did not end"
        assert self.stream.wait_until_ended(max(0.0, deadline - time.monotonic())), "the generation did not end"
        for thread in (self.thread, self.opening):
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"the {thread.name} client did not end"
        h = 0
        ends = [future.exception(0) for future in self.futures]
        n_done = ends.index(next(e for e in ends if e is not None))
        for token, future in enumerate(self.futures[:n_done]):
            h = advance(h, [token % VOCAB])
            assert future.result(0).tokens.tolist() == [answer(h, VOCAB)]
        assert {type(e) for e in ends[n_done:]} == {shmsched.SchedulerStopped}
        h = advance(0, [1])
        with pytest.raises(shmsched.SchedulerStopped):
            while True:
                token = self.stream.next(0).token
                assert token == answer(h, VOCAB)
                h = advance(h, [token])
        assert [type(e) for e in self.awaited] == [shmsched.SchedulerStopped] * 2, self.awaited
        assert type(self.refusal) is shmsched.SchedulerStopped
        with pytest.raises(shmsched.SchedulerStopped):
            self.client.open_session()


def test_a_second_signal_ends_it_at_once_and_everybody_is_told(cluster: shmsched.Cluster) -> None:
    everything = Everything(cluster)
    os.kill(cluster.pid, signal.SIGTERM)
    everything.opening.join(DEADLINE)
    assert not everything.opening.is_alive(), "who waits for a session is refused at the first"
    assert not everything.futures[-1].done()
    n_done = sum(future.done() for future in everything.futures)
    wait_until(lambda: sum(f.done() for f in everything.futures) > n_done, "open sessions to go on after the first")
    os.kill(cluster.pid, signal.SIGINT)
    everything.check(AT_ONCE_S)
    assert cluster._process.wait(DEADLINE) == 0


def test_at_the_drain_timeout_it_ends_and_not_before(cluster: shmsched.Cluster) -> None:
    everything = Everything(cluster)
    with shmsched.Control(cluster.socket) as control:
        assert control.stop(drain_s=1.0) == 1.0
        stopped = time.monotonic()
    wait(everything.futures[-1:], DEADLINE)
    assert 1.0 <= time.monotonic() - stopped < 1.0 + AT_ONCE_S
    everything.check(AT_ONCE_S)
    assert cluster._process.wait(DEADLINE) == 0


def test_a_generation_that_ends_in_time_is_drained_and_the_daemon_ends_with_its_last_session(
    cluster: shmsched.Cluster,
) -> None:
    client = cluster.client()
    session, other = client.open_session(), client.open_session()
    stream = session.stream([1], further=20)
    stream.next(DEADLINE)
    with shmsched.Control(cluster.socket) as control:
        control.stop()
    with pytest.raises(shmsched.SchedulerStopped):
        other.fork()
    other.close()
    h = advance(advance(0, [1]), [answer(advance(0, [1]), VOCAB)])
    for _ in range(20):
        token = stream.next(DEADLINE).token
        assert token == answer(h, VOCAB)
        h = advance(h, [token])
    assert stream.last
    # A drained session goes on until it is closed: its client may have more to do.
    assert session.submit([1]).result(DEADLINE).tokens.size == 1
    session.close()
    assert cluster._process.wait(AT_ONCE_S) == 0


@pytest.mark.parametrize("open_sessions", [True, False])
def test_a_second_signal_does_not_wait_for_an_engine_in_the_middle_of_a_step(open_sessions: bool) -> None:
    with shmsched.launch("echo?step_us=60000000") as cluster, cluster.client() as client:
        session = client.open_session()
        future = session.submit([1])
        wait_until(lambda: cluster.status()["engines"][0]["in_flight"], "the step to run")
        if not open_sessions:
            session.close()
        with shmsched.Control(cluster.socket) as control:
            # Without a session the first ends it, too, but for the engine.
            control.stop()
        os.kill(cluster.pid, signal.SIGTERM)
        assert isinstance(future.exception(AT_ONCE_S), shmsched.SchedulerStopped | shmsched.SessionClosed)
        assert cluster._process.wait(2 * AT_ONCE_S) == 0

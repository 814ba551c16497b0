"""Who reads the connection: a caller that waits, or the thread; and nobody waits for what the other has."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait
from pathlib import Path

import pytest

import shmsched
from shmsched.workers.echo import advance, answer

from processes.leftovers import wait_until

VOCAB = 1000
DEADLINE = 30.0
ENGINES = Path(__file__).with_name("engines.py")


@pytest.fixture(scope="module")
def slow() -> Iterator[shmsched.Cluster]:
    """One step takes 100 ms."""
    with shmsched.launch(f"echo?vocab={VOCAB}&step_us=100000&max_sessions=64") as cluster:
        yield cluster


@pytest.fixture
def client(slow: shmsched.Cluster) -> Iterator[shmsched.Client]:
    with slow.client() as client:
        yield client


def echo(*fed: int) -> list[int]:
    return [answer(advance(0, fed), VOCAB)]


def test_a_caller_that_reads_settles_what_others_wait_for(client: shmsched.Client) -> None:
    called: list[int] = []
    sessions = [client.open_session() for _ in range(8)]
    futures = [session.submit([i]) for i, session in enumerate(sessions)]
    for future in futures[1:]:
        future.add_done_callback(lambda f: called.append(threading.get_ident()))
    assert futures[0].result(DEADLINE).tokens.tolist() == echo(0)
    assert not wait(futures, DEADLINE).not_done
    assert len(called) == 7


def test_threads_that_wait_at_once_all_get_their_answers(client: shmsched.Client) -> None:
    """The first of them reads, and leaves with its own answer; those behind it must not wait for the next one to come."""
    sessions = [client.open_session() for _ in range(6)]
    wrong: list[object] = []

    def work(i: int) -> None:
        fed = []
        for k in range(5):
            fed.append((7 * i + k) % VOCAB)
            tokens = sessions[i].submit(fed[-1:]).result(DEADLINE).tokens.tolist()
            if tokens != echo(*fed):
                wrong.append((i, k, tokens))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_what_is_kept_back_to_be_sent_together_is_sent_all_the_same(client: shmsched.Client) -> None:
    """After several answers at once, submissions wait for each other; but not for a caller that does something else."""
    sessions = [client.open_session() for _ in range(4)]
    futures = [session.submit([1]) for session in sessions]
    for future in futures:
        future.result(DEADLINE)
    only = sessions[0].submit([2])
    # Not result(), which would send it: nobody of this process waits on the connection but the thread.
    assert not wait([only], DEADLINE).not_done
    assert only.result(0).tokens.tolist() == echo(1, 2)


def test_a_time_out_leaves_the_answer_to_come(client: shmsched.Client) -> None:
    future = client.open_session().submit([5])
    with pytest.raises(TimeoutError):
        future.result(0.01)
    assert future.exception(DEADLINE) is None
    assert future.result(0).tokens.tolist() == echo(5)


def test_a_callback_that_waits_for_another_answer_is_told_so(client: shmsched.Client) -> None:
    sessions = [client.open_session() for _ in range(2)]
    other = sessions[1].submit([1] * 1000)
    said: list[BaseException | None] = []

    def callback(_: object) -> None:
        try:
            sessions[1].submit([2]).result(DEADLINE)
        except BaseException as e:
            said.append(e)

    first = sessions[0].submit([1])
    first.add_done_callback(callback)
    first.result(DEADLINE)
    assert isinstance(said[0], shmsched.Full)
    assert "a future's callback cannot wait for another answer" in str(said[0])
    other.result(DEADLINE)


def test_a_cancel_of_another_thread_wakes_the_caller_though_the_daemon_says_nothing() -> None:
    with shmsched.launch(f"echo?vocab={VOCAB}&step_us=100000") as cluster, cluster.client() as client:
        future = client.open_session().submit([5])
        os.kill(cluster.pid, signal.SIGSTOP)
        try:
            canceller = threading.Timer(0.05, future.cancel)
            canceller.start()
            with pytest.raises(CancelledError):
                future.result(DEADLINE)
            canceller.join()
        finally:
            os.kill(cluster.pid, signal.SIGCONT)


def test_an_interrupt_while_waiting_leaves_everything_in_order(client: shmsched.Client) -> None:
    session = client.open_session()
    future = session.submit([5])
    interrupter = threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGINT))
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        future.result(DEADLINE)
        time.sleep(DEADLINE)
    interrupter.join()
    assert future.result(DEADLINE).tokens.tolist() == echo(5)
    assert session.submit([6]).result(DEADLINE).tokens.tolist() == echo(5, 6)


def test_an_idle_client_sleeps_also_after_its_callers_have_read(client: shmsched.Client) -> None:
    """The thread that stood aside goes back to waiting for the connection, and does not look again and again."""
    session = client.open_session()
    for i in range(3):
        session.submit([i]).result(DEADLINE)
    receiver = client._receiver.native_id

    def switches() -> int:
        status = Path(f"/proc/self/task/{receiver}/status").read_text()
        return int(status.split("voluntary_ctxt_switches:")[1].split()[0])

    def quiet() -> bool:
        before = switches()
        time.sleep(0.2)
        return switches() - before <= 1

    wait_until(quiet, "the receiving thread to sleep")


def test_a_closed_client_keeps_no_descriptor_and_no_memory(slow: shmsched.Cluster) -> None:
    """At once: cycles that wait for the collector would fill the table of descriptors."""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("/dev/shm/shmsched")

    gc.collect()
    gc.disable()
    try:
        before = held()
        for _ in range(10):
            with shmsched.Client(socket=slow.socket) as client, client.open_session() as session:
                session.submit([1]).result(DEADLINE)
        del client, session
        assert held() == before
    finally:
        gc.enable()


def test_what_is_left_for_later_does_not_wait_for_a_caller_that_waits_long() -> None:
    """Its answers came together, so it is sent with what follows them; and nothing follows while one waits for another model."""
    with (
        shmsched.launch("echo?model=slow&step_us=3000000", "echo?step_us=30000") as cluster,
        cluster.client() as client,
    ):
        slow = client.open_session(model="slow")
        sessions = [client.open_session(model="echo") for _ in range(2)]
        for session in sessions:
            session.submit([1]).result(DEADLINE)
        patient = slow.submit([1])
        reader = threading.Thread(target=patient.result, args=(DEADLINE,))
        reader.start()
        wait_until(lambda: client._receiver._reading, "the one that waits to read")
        while not patient.done():
            futures = [session.submit([1]) for session in sessions]
            assert not wait(futures, DEADLINE).not_done
            began = time.monotonic()
            alone = sessions[0].submit([1])
            assert not wait([alone], DEADLINE).not_done
            took = time.monotonic() - began
            assert not patient.done() or took < 1.0, "it was sent when the slow model answered"
        reader.join(DEADLINE)


def test_a_callback_that_would_wait_for_a_token_is_refused_and_the_client_goes_on(client: shmsched.Client) -> None:
    session, other = client.open_session(), client.open_session()
    stream = other.stream([1], further=50)
    refused: list[str] = []

    def in_vain(future: object) -> None:
        for wait_for in (
            lambda: list(session.generate([1], max_new_tokens=3)),
            lambda: [stream.next() for _ in range(50)],
            stream.wait_until_ended,
        ):
            try:
                wait_for()
            except shmsched.Full as e:
                refused.append(str(e))

    future = session.submit([1])
    future.add_done_callback(in_vain)
    wait_until(lambda: len(refused) == 3, "the callback to be refused thrice")
    assert all("a future's callback cannot wait for" in reason for reason in refused)
    stream.cancel()
    assert session.submit([2]).result(DEADLINE).tokens.tolist() == echo(1, 2)


def test_a_generation_collected_in_a_callback_does_not_wait_for_what_its_own_thread_receives() -> None:
    """An engine that cannot rewind finishes its step, whose token comes to the thread on which the collector runs."""
    with (
        shmsched.launch(f"{ENGINES}:Rigid?vocab={VOCAB}&step_us=30000") as cluster,
        cluster.client() as client,
        client.open_session() as session,
        client.open_session() as other,
    ):
        ring: list[object] = [session.generate([1], max_new_tokens=1000)]
        ring.append(ring)
        collected = threading.Event()

        def collect(future: object) -> None:
            ring.clear()
            collected.set()

        future = other.submit([1])
        future.add_done_callback(collect)
        assert collected.wait(DEADLINE)
        assert other.submit([2]).result(DEADLINE).tokens.tolist() == echo(1, 2)
        wait_until(lambda: session.unfed is not None, "the generation to leave its session")
        fed = session.history.tolist()
        assert echo(*fed) == [session.unfed]

"""More than the daemon can serve: what is admitted is served, what is not waits or is told, and nothing grows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

import shmsched

from faults.decoding import DEADLINE, VOCAB, Decoding
from faults.test_fuzzed_peers import resident
from processes.leftovers import wait_until

MOST_QUEUED = 64
SLOW = f"echo?vocab={VOCAB}&step_us=2000&max_sessions=64"

FLOOD = """
import shmsched, sys
from shmsched.workers.echo import advance, answer
client = shmsched.Client(socket=sys.argv[1])
sessions = [client.open_session() for _ in range(8)]
hashes, futures = [0] * 8, []
print("ready", flush=True)
sys.stdin.readline()
for i in range(int(sys.argv[2])):
    hashes[i % 8] = advance(hashes[i % 8], [i % 1000])
    futures.append((sessions[i % 8].submit([i % 1000]), answer(hashes[i % 8], 1000)))
print("submitted", flush=True)
assert [future.result(120).tokens.tolist() for future, _ in futures] == [[right] for _, right in futures]
print("all right", flush=True)
"""


@contextmanager
def flooding(cluster: shmsched.Cluster, clients: int, steps: int) -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        processes = []
        for _ in range(clients):
            command = [sys.executable, "-c", FLOOD, str(cluster.socket), str(steps)]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            processes.append(process)
        # All at once, however long each has taken to start.
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        yield processes


def paused(cluster: shmsched.Cluster) -> list[dict[str, Any]]:
    return [client for client in cluster.status()["clients"] if client["paused"]]


def test_under_ten_times_the_load_nothing_is_lost_nothing_grows_and_an_honest_client_goes_on() -> None:
    """Three clients submit as fast as they can, all at once, some thousand steps to a queue of 64."""
    with shmsched.launch(SLOW, max_queued_steps=MOST_QUEUED) as cluster, cluster.client() as client:
        honest = Decoding(client)
        honest.go_on(1)
        before = resident(cluster.pid)
        with flooding(cluster, 3, 1200) as flooders:
            wait_until(lambda: len(paused(cluster)) == 3, "all three to be paused", DEADLINE)
            assert cluster.status()["paused_clients"] >= 1
            most = 0
            for _ in range(20):
                honest.go_on(2)
                status = cluster.status()
                most = max(most, status["ledger"]["queued"])
                assert status["ledger"]["balanced"]
                shut_out = [c["pid"] for c in status["clients"] if c["paused"]]
                assert os.getpid() not in shut_out, "who does not flood is read"
            # Each may be in the middle of one frame when the limit is reached.
            assert most <= 2 * MOST_QUEUED
            assert resident(cluster.pid) - before < 32 << 20
            for process in flooders:
                assert process.stdout is not None
                assert process.stdout.read().split("\n")[:2] == ["submitted", "all right"]
                assert process.wait(DEADLINE) == 0
        wait_until(lambda: cluster.status()["paused_clients"] == 0, "nobody to be paused")
        status = cluster.status()
        assert status["ledger"]["completed"] == status["ledger"]["submitted"]
        honest.go_on(5)


def test_a_paused_client_that_dies_is_seen_and_the_others_are_read_again() -> None:
    with (
        shmsched.launch(SLOW, max_queued_steps=MOST_QUEUED) as cluster,
        cluster.client() as client,
        flooding(cluster, 2, 8000) as flooders,
    ):
        wait_until(lambda: len(paused(cluster)) == 2, "both to be paused", DEADLINE)
        flooders[0].kill()
        wait_until(
            lambda: flooders[0].pid not in [c["pid"] for c in cluster.status()["clients"]], "its death to be seen"
        )
        assert flooders[0].pid not in [c["pid"] for c in paused(cluster)]
        completed = cluster.status()["ledger"]["completed"]
        wait_until(lambda: cluster.status()["ledger"]["completed"] > completed + 100, "the other to go on", DEADLINE)
        os.kill(flooders[1].pid, signal.SIGKILL)
        wait_until(lambda: cluster.status()["ledger"]["queued"] == 0, "what they had queued to be gone")
        assert cluster.status()["paused_clients"] == 0
        Decoding(client).go_on(5)


def test_cancels_and_deadlines_of_a_paused_client_hold_once_it_is_read() -> None:
    slow = f"echo?vocab={VOCAB}&step_us=100000&max_sessions=64"
    with shmsched.launch(slow, max_queued_steps=8) as cluster, cluster.client() as client:
        sessions = [client.open_session() for _ in range(40)]
        futures = [session.submit([1]) for session in sessions for _ in range(3)]
        wait_until(lambda: cluster.status()["paused_clients"] == 1, "the client to be paused")
        late = [session.submit([2], deadline=time.monotonic() + 0.0005) for session in sessions[:8]]
        cancelled = [session.submit([2]) for session in sessions[8:16]]
        for future in cancelled:
            future.cancel()
        for future in futures:
            assert len(future.result(DEADLINE).tokens) == 1
        for future in late:
            with pytest.raises(shmsched.DeadlineExceeded):
                future.result(DEADLINE)
        assert all(future.cancelled() or future.result(DEADLINE) for future in cancelled)
        assert [session.submit([3]).result(DEADLINE).tokens.size for session in sessions] == [1] * 40
        wait_until(lambda: cluster.status()["paused_clients"] == 0, "the client to be read again")
        ledger = cluster.status()["ledger"]
        assert (ledger["balanced"], ledger["queued"], ledger["in_flight"]) == (True, 0, 0)


def test_without_room_submit_raises_full_at_once_or_when_it_has_waited() -> None:
    with (
        shmsched.launch("echo?step_us=20000&max_sessions=4", max_queued_steps=8) as cluster,
        cluster.client() as client,
    ):
        session, other = client.open_session(), client.open_session()
        futures: list[Any] = []
        with pytest.raises(shmsched.Full):
            futures.extend(session.submit([1], block=False) for _ in range(20_000))
        assert 8192 <= len(futures) < 10_000, "the outstanding steps that a client may have, and those done meanwhile"
        began = time.monotonic()
        with pytest.raises(shmsched.Full):
            # Each takes a place that a step which completed has left, if there is one.
            for _ in range(1000):
                other.submit([1], block_timeout=0.001)
        assert time.monotonic() - began < DEADLINE
        status = cluster.status()
        assert status["ledger"]["queued"] < 1000, "what is not admitted waits in the client"
        with cluster.client() as third:
            # It is not behind those 8,192.
            assert third.open_session().submit([1]).result(DEADLINE).tokens.size == 1
        client.close()
        assert futures[-1].exception(DEADLINE) is not None or futures[-1].cancelled()
        wait_until(lambda: cluster.status()["ledger"]["queued"] == 0, "what it had queued to be gone")
        assert cluster.status()["ledger"]["submitted"] < 2000, "what was not admitted never was"


def test_a_client_that_streams_and_never_reads_stalls_itself_only() -> None:
    """Its generations wait for room in its stream; the daemon keeps one token for each, and the others go on."""
    program = (
        "import os, shmsched, signal, sys\n"
        "client = shmsched.Client(socket=sys.argv[1])\n"
        "sessions = [client.open_session() for _ in range(32)]\n"
        "streams = [session.stream([1], further=50_000) for session in sessions]\n"
        "print('streaming', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    engine = f"echo?vocab={VOCAB}&max_sessions=64&max_session_tokens=100000"
    with (
        shmsched.launch(engine) as cluster,
        cluster.client() as client,
        subprocess.Popen([sys.executable, "-c", program, str(cluster.socket)], stdout=subprocess.PIPE) as stuck,
    ):
        try:
            honest = Decoding(client)
            assert stuck.stdout is not None
            assert stuck.stdout.readline() == b"streaming\n"

            def stalled() -> bool:
                status = cluster.status()
                return status["ledger"]["queued"] == 32 and status["engines"][0]["queued"] == 0

            wait_until(stalled, "all its generations to wait for it", 60.0)
            completed = cluster.status()["ledger"]["completed"]
            honest.go_on(100)
            assert cluster.status()["ledger"]["completed"] == completed + 100
            assert cluster.status()["ledger"]["balanced"]
        finally:
            stuck.kill()
        wait_until(lambda: cluster.status()["ledger"]["queued"] == 0, "its generations to be gone")
        honest.go_on(5)

"""Whoever waits for a session's slot is told who has them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.commands import shmsched as command

import shmsched

from processes.leftovers import wait_until
from processes.loops import DEADLINE, Run

HOLDER = """
import sys, shmsched
client = shmsched.Client(socket=sys.argv[1])
sessions = [client.open_session() for _ in range(2)]
print("held", flush=True)
sys.stdin.read()
client.close()
"""


@pytest.fixture
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch("echo?max_sessions=3") as cluster:
        yield cluster


@pytest.fixture
def holder(cluster: shmsched.Cluster) -> Iterator[int]:
    """The pid of a process that has two of the three slots."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(cluster.socket)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"held\n"
        yield process.pid
        process.stdin.close()
        process.wait(DEADLINE)


def test_full_names_the_processes_that_have_the_slots(cluster: shmsched.Cluster, holder: int) -> None:
    held = rf"model 'echo' is taken: 3 of 3 in use, held by client pid {holder} \(2\), client pid {os.getpid()} \(1\)"
    with cluster.client() as client, client.open_session() as session:
        with pytest.raises(shmsched.Full, match=held):
            client.open_session(model="echo", block=False)
        for timeout in (0.0, 0.2):
            with pytest.raises(
                shmsched.Full,
                match=rf"no session slot of model 'echo' became free within {timeout:g} s: every .*{held}",
            ):
                client.open_session(model="echo", timeout=timeout)
        session.submit([1, 2]).result(DEADLINE)
        with pytest.raises(shmsched.Full, match=rf"taken.* held by client pid {holder} \(2\)"):
            session.fork(block=False)
        with pytest.raises(shmsched.Full, match=rf"held by client pid {holder} \(2\)"):
            session.fork(timeout=0.2)
    wait_until(lambda: cluster.status()["waiting_sessions"] == 0, "nobody to wait any longer")


def test_an_async_client_is_told_too(cluster: shmsched.Cluster, holder: int, run: Run) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session():
            for timeout in (0.0, 0.2):
                with pytest.raises(shmsched.Full, match=rf"within {timeout:g} s: .*held by client pid {holder} \(2\)"):
                    await client.open_session(timeout=timeout)
            with pytest.raises(shmsched.Full, match=rf"held by client pid {holder} \(2\)"):
                await client.open_session(block=False)

    run(main())
    wait_until(lambda: cluster.status()["engines"][0]["sessions"] == 2, "its session to be closed")


def test_status_says_who_waits_and_who_holds(cluster: shmsched.Cluster, holder: int, tmp_path: Path) -> None:
    with cluster.client() as client, client.open_session():
        opened: list[shmsched.Session] = []
        waiting = threading.Thread(target=lambda: opened.append(client.open_session(model="echo", timeout=DEADLINE)))
        waiting.start()
        wait_until(lambda: cluster.status()["waiting_sessions"] == 1, "it to wait")
        document = cluster.status()
        assert document["waiting"] == [{"model": "echo", "pid": os.getpid(), "sessions": 1}]
        assert document["engines"][0]["held_by"] == [
            {"pid": holder, "sessions": 2},
            {"pid": os.getpid(), "sessions": 1},
        ]
        said = " ".join(command(tmp_path, "status", "--socket", str(cluster.socket)).stdout.split())
        assert f"1 session waits for a free slot: 1 of pid {os.getpid()} for echo" in said
        assert f"held by pid {holder} (2), pid {os.getpid()} (1)" in said
        os.kill(holder, signal.SIGKILL)
        waiting.join(DEADLINE)
        assert len(opened) == 1
        opened[0].close()
        assert cluster.status()["waiting"] == []


def test_a_scheduler_that_says_nothing_is_not_waited_for_long(cluster: shmsched.Cluster) -> None:
    with cluster.client() as client:
        os.kill(cluster.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(shmsched.Full, match="within 0.1 s"):
                client.open_session(timeout=0.1)
            assert time.monotonic() - began < 5.0
        finally:
            os.kill(cluster.pid, signal.SIGCONT)
        wait_until(lambda: cluster.status()["engines"][0]["sessions"] == 0, "what nobody waits for to be closed")
        with client.open_session() as session:
            session.submit([1]).result(DEADLINE)

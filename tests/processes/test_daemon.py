"""The daemon's own life: its end, its limits, and what it leaves behind, which is nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

import shmsched
from shmsched.wire import frames
from shmsched.wire.link import Link
from shmsched.workers.echo import advance, answer

from processes.leftovers import wait_until

DEADLINE = 30.0


@pytest.fixture
def slow() -> Iterator[shmsched.Cluster]:
    with shmsched.launch("echo?step_us=100000") as cluster:
        yield cluster


def test_engines_die_with_a_killed_daemon_even_in_the_middle_of_a_step() -> None:
    with shmsched.launch("echo?step_us=60000000") as cluster, cluster.client() as client:
        session = client.open_session()
        session.submit([1])
        wait_until(lambda: cluster.status()["engines"][0]["in_flight"], "the step to run")
        engine = cluster.status()["engines"][0]["pid"]
        os.kill(cluster.pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{engine}").exists(), "the engine to die with its daemon")


def test_a_private_daemon_ends_with_its_launcher(tmp_path: Path) -> None:
    program = (
        "import shmsched, os, signal\n"
        "cluster = shmsched.launch('echo')\n"
        "print(cluster.pid, cluster.status()['engines'][0]['pid'], cluster.socket, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    daemon, engine, socket = output.stdout.split()
    for pid in (daemon, engine):
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"process {pid} to end with its launcher")
    assert not Path(socket).exists()


def test_stopping_lets_open_sessions_finish_and_refuses_new_ones(slow: shmsched.Cluster) -> None:
    with slow.client() as client:
        session = client.open_session()
        future = session.submit([1])
        os.kill(slow.pid, signal.SIGTERM)
        with pytest.raises(shmsched.SchedulerStopped, match="takes no new sessions"):
            for _ in range(1000):
                client.open_session(timeout=DEADLINE).close()
        assert future.result(DEADLINE).tokens.tolist() == [answer(advance(0, [1]), 32000)]
        assert session.submit([2]).result(DEADLINE).tokens.size == 1
        session.close()
    assert slow.close() == 0


def test_the_drain_timeout_settles_what_is_left_and_exits_0() -> None:
    with shmsched.launch("echo?step_us=300000", drain_timeout_s=0.1) as cluster, cluster.client() as client:
        session = client.open_session()
        futures = [session.submit([t]) for t in range(20)]
        os.kill(cluster.pid, signal.SIGTERM)
        assert not wait(futures, DEADLINE).not_done
        assert isinstance(futures[-1].exception(), shmsched.SchedulerStopped)
        assert cluster._process.wait(DEADLINE) == 0


def test_a_second_signal_ends_it_at_once(slow: shmsched.Cluster) -> None:
    with slow.client() as client:
        session = client.open_session()
        futures = [session.submit([t]) for t in range(50)]
        with shmsched.Control(slow.socket) as control:
            control.stop()
            control.stop()
            assert control.wait_closed(4.0), "the daemon still runs 4 s after a second stop"
        assert not wait(futures, DEADLINE).not_done
    assert slow._process.wait(DEADLINE) == 0


def test_an_idle_daemon_and_engine_sleep() -> None:
    """Not one wake-up in a second: with clients and engines connected and nothing to do, nothing polls."""
    with shmsched.launch("echo") as cluster, cluster.client() as client, client.open_session() as session:
        session.submit([1]).result(DEADLINE)
        pids = [cluster.pid, cluster.status()["engines"][0]["pid"]]

        def slept() -> bool:
            before = [switches(pid) for pid in pids]
            threading.Event().wait(1.0)
            return [switches(pid) for pid in pids] == before

        # The status question itself wakes the daemon, and it looks once more after the last step.
        wait_until(slept, "daemon and engine to sleep for a second")


def test_a_newer_minor_version_is_welcome_and_another_major_is_refused_in_words(slow: shmsched.Cluster) -> None:
    for major, minor, welcome in ((frames.MAJOR, frames.MINOR + 7, True), (frames.MAJOR + 1, 0, False)):
        link = Link.connect(slow.socket, frames.Role.CONTROL)
        link.close()
        answers = talk(slow.socket, frames.Hello(frames.MAGIC, major, minor, frames.Role.CONTROL), frames.AskStatus(0))
        if welcome:
            assert isinstance(answers[0], frames.Status)
        else:
            assert f"speaks protocol {major}.0; this daemon speaks {frames.MAJOR}.{frames.MINOR}" in answers[0].message


def test_a_plain_multiprocessing_connection_can_speak_to_it(slow: shmsched.Cluster) -> None:
    from multiprocessing.connection import Client

    from shmsched.wire.codec import pack, unpack

    with Client(str(slow.socket), "AF_UNIX") as connection:
        connection.send_bytes(pack(frames.Hello(frames.MAGIC, frames.MAJOR, frames.MINOR, frames.Role.CONTROL)))
        connection.send_bytes(pack(frames.AskStatus(0)))
        assert json.loads(unpack(connection.recv_bytes()).document)["state"] == "running"


def test_garbage_costs_its_sender_the_connection_and_nobody_else_anything(slow: shmsched.Cluster) -> None:
    import socket

    with slow.client() as client, client.open_session() as session:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x04abcd", b"\xff\xff\xff\xff", b"\x00\x00\x00\x00"):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(DEADLINE)
                peer.connect(str(slow.socket))
                peer.sendall(garbage)
                while peer.recv(65536):
                    pass
        assert session.submit([1]).result(DEADLINE).tokens.size == 1


def talk(path: Path, hello: frames.Hello, *questions: Any) -> list[Any]:
    """Say ``hello`` and ask; everything that comes back until the first answer."""
    import socket
    from multiprocessing.connection import Connection

    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(path))
    link = Link(Connection(sock.detach()))
    link.send(hello)
    for question in questions:
        try:
            link.send(question)
        except shmsched.SchedulerDied:
            break
    try:
        return link.receive(DEADLINE) or []
    finally:
        link.close()


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def switches(pid: int) -> int:
    """Context switches of all threads of the process."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if "ctxt_switches" in line:
                total += int(line.split()[1])
    return total


def test_a_daemon_with_no_room_says_so_and_is_asked_and_stopped_all_the_same() -> None:
    with shmsched.launch("echo", max_clients=2) as cluster, cluster.client():
        for _ in range(20):
            with pytest.raises(shmsched.Full, match="2 connections are open"):
                shmsched.Client(socket=cluster.socket)
            assert len(cluster.status()["clients"]) == 1
        silent = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        for sock in silent:
            sock.connect(str(cluster.socket))
        with shmsched.Control(cluster.socket) as control:
            assert control.status()["state"] == "running"
            control.stop(drain_s=0.0)
        assert cluster._process.wait(DEADLINE) == 0
        for sock in silent:
            sock.close()

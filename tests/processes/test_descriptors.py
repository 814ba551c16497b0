"""No descriptors left: whoever lacks one is told so, in words, and nobody else notices."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import shmsched
from shmsched.workers.echo import advance, answer

from processes.leftovers import wait_until

DEADLINE = 30.0

CLIENT = """
import asyncio, gc, os, resource, shmsched, sys

def left(n):
    '''Leave only n descriptors.'''
    gc.collect()
    used = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + n, 4096))
    return used

def connect():
    shmsched.Client(socket=sys.argv[1]).close()

async def connect_async():
    async with shmsched.AsyncClient(socket=sys.argv[1]):
        pass

loop = asyncio.new_event_loop()
connect()
shmsched.AsyncClient  # imported when asked for, which takes descriptors too
for attempt in (connect, lambda: loop.run_until_complete(connect_async())):
    refusals = 0
    for n in range(20):
        used = left(n)
        try:
            attempt()
        except (shmsched.SystemLimit, shmsched.SharedMemoryError) as e:
            assert "descriptor" in str(e) or "Too many open files" in str(e), e
            refusals += 1
        else:
            break
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        # What a client that was closed before still holds, too.
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) - 1 == used, "an attempt that failed left a descriptor"
        attempt()
    print(refusals)
loop.close()
"""


def test_a_client_without_descriptors_is_told_so_and_may_try_again() -> None:
    with shmsched.launch("echo") as cluster:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, str(cluster.socket)], capture_output=True, text=True, timeout=DEADLINE
        )
        assert done.stderr == ""
        refusals = [int(n) for n in done.stdout.split()]
        assert len(refusals) == 2
        assert min(refusals) >= 3, "a socket, its second copy, and a segment are needed at least"


def test_a_daemon_without_descriptors_refuses_in_words_or_lets_wait_and_goes_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with (
        shmsched.launch("echo?vocab=1000") as cluster,
        shmsched.Client(socket=cluster.socket) as bystander,
        bystander.open_session() as session,
        ThreadPoolExecutor(1) as pool,
    ):
        descriptors = Path(f"/proc/{cluster.pid}/fd")
        h = 0

        def decode(token: int) -> None:
            nonlocal h
            h = advance(h, [token])
            assert session.submit([token]).result(DEADLINE).tokens.tolist() == [answer(h, 1000)]

        decode(1)
        before = resource.prlimit(cluster.pid, resource.RLIMIT_NOFILE)
        used = {int(path.name) for path in descriptors.iterdir()}
        free = [n for n in range(max(used) + 11) if n not in used]
        refused, waited = 0, 0
        for room in range(10):
            resource.prlimit(cluster.pid, resource.RLIMIT_NOFILE, (free[room], before[1]))
            coming = pool.submit(shmsched.Client, socket=cluster.socket)
            decode(room)
            try:
                error = coming.exception(0.5)
            except TimeoutError:
                # It waits in the backlog, until there is a descriptor for it.
                waited += 1
                resource.prlimit(cluster.pid, resource.RLIMIT_NOFILE, before)
                coming.result(DEADLINE).close()
            else:
                if error is None:
                    coming.result(0).close()
                else:
                    refused += 1
                    assert isinstance(error, shmsched.ShmschedError)
                    assert re.search("open files|files open|closed the connection", str(error)), error
            decode(room)
            resource.prlimit(cluster.pid, resource.RLIMIT_NOFILE, before)
            wait_until(lambda: len(list(descriptors.iterdir())) == len(used), "the daemon to give back what it took")
        assert waited
        assert refused
        shmsched.Client(socket=cluster.socket).close()
    err = capfd.readouterr().err
    # Not once for each time that it tries again.
    assert waited <= err.count("cannot accept connections for now: Too many open files") <= 10, err


def test_what_is_launched_inherits_no_descriptor() -> None:
    """Neither the daemon nor an engine: who holds the other end of somebody's pipe or socket keeps it from ending."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        with shmsched.launch("echo") as cluster:
            engine = cluster.status()["engines"][0]["pid"]
            pipe = os.readlink(f"/proc/self/fd/{write}")
            for pid in (cluster.pid, _parent(engine), engine):
                held = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
                assert pipe not in held, f"process {pid} of {cluster.pid} has {pipe} of its launcher"
    finally:
        os.close(read)
        os.close(write)


def test_what_the_daemon_inherits_its_engines_do_not(tmp_path: Path) -> None:
    read, write = os.pipe()
    socket = tmp_path / "s"
    daemon = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from shmsched.cli import main; main()",
            "up",
            "--socket",
            str(socket),
            "--engine",
            "echo",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(write,),
    )
    try:
        assert daemon.stdout is not None
        assert daemon.stdout.readline().startswith(b"ready ")
        with shmsched.Control(socket) as control:
            engine = control.status()["engines"][0]["pid"]
        pipe = os.readlink(f"/proc/self/fd/{write}")
        assert pipe in {os.readlink(path) for path in Path(f"/proc/{daemon.pid}/fd").iterdir()}
        for pid in (_parent(engine), engine):
            assert pipe not in {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    finally:
        os.close(read)
        os.close(write)
        daemon.terminate()
        assert daemon.wait(DEADLINE) == 0
        assert daemon.stdout is not None
        daemon.stdout.close()


def _parent(pid: int) -> int:
    """The engine's keeper."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^PPid:\t(\d+)$", status, re.MULTILINE)
    assert found is not None, status
    return int(found[1])

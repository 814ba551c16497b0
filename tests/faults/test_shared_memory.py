"""Faults of shared memory: who destroys it, who leaves it behind, and who writes into rows that are somebody else's."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import posix_ipc
import pytest

import shmsched
from shmsched.dataplane.layouts import GUARD, aligned
from shmsched.memory.segment import start_time
from shmsched.wire import frames
from shmsched.wire.link import Link
from shmsched.workers.echo import advance, answer

from processes.engines import Moody
from processes.leftovers import shm_names, wait_until
from support.peers.by_hand import EngineByHand

VOCAB = 1000
DEADLINE = 30.0

CLIENT = """
import multiprocessing.resource_tracker as tracker, shmsched, sys
client = shmsched.Client(socket=sys.argv[1])
session = client.open_session()
kept = session.submit([1], sampling=None).result(30).logits.data
assert session.submit([2]).result(30).tokens.size == 1
assert tracker._resource_tracker._fd is None, "a resource tracker was started"
print("in use", flush=True)
sys.stdin.read()
"""
# Whoever started us in the background had SIGINT ignored, for all that we start too.
ENGINE = """
import signal, sys
from shmsched.engine.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
"""


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process of its own; what it prints goes to pipes."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["clean", "killed"])
def test_f2_whoever_exits_destroys_nothing_and_no_tracker_warns(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    with shmsched.launch(f"echo?vocab={VOCAB}") as cluster, cluster.client() as client:
        path = str(cluster.socket)
        session = client.open_session()
        kept = session.submit([5], sampling=None).result(DEADLINE).logits.data  # type: ignore[union-attr]
        before, h = kept.copy(), advance(0, [5])
        for _ in range(2):
            with (
                running("-c", ENGINE, f"echo?vocab={VOCAB}", "--socket", path) as engine,
                running("-c", CLIENT, path) as other,
            ):
                assert other.stdout is not None
                assert other.stdout.readline() == "in use\n"
                wait_until(lambda: len(cluster.status()["engines"]) == 2, "the second engine to attach")
                for process, end in (
                    (other, signal.SIGKILL),
                    (engine, signal.SIGKILL if how == "killed" else signal.SIGINT),
                ):
                    if how == "killed" or process is engine:
                        process.send_signal(end)
                    # The end of its standard input ends the client; a tracker would hold its standard error until it has warned.
                    _, err = process.communicate(timeout=DEADLINE)
                    assert err == ""
                    h = advance(h, [7])
                    raw = session.submit([7], sampling=None).result(DEADLINE).logits
                    assert raw is not None
                    assert int(raw.data.argmax()) == answer(h, VOCAB)
                    assert (kept == before).all()
            wait_until(lambda: len(cluster.status()["engines"]) == 1, "the daemon to see the engine's end")
    assert "resource_tracker" not in capfd.readouterr().err


@pytest.mark.alone
def test_f3_killing_everything_at_once_leaves_nothing_in_dev_shm() -> None:
    """In a steady state no name exists, so no kill can leave one."""
    with shmsched.launch("echo", engines=2) as cluster, running("-c", CLIENT, str(cluster.socket)) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "in use\n"
        assert shm_names() == set()
        engines = [e["pid"] for e in cluster.status()["engines"]]
        for pid in (cluster.pid, *engines, client.pid):
            os.kill(pid, signal.SIGKILL)
        client.wait(DEADLINE)
        for pid in engines:
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"engine {pid} to be gone")
        assert shm_names() == set()


@pytest.mark.alone
def test_f3_what_a_kill_during_creation_left_is_swept_at_the_next_start() -> None:
    with running("-c", "input()") as maker:
        dead, started = maker.pid, start_time(maker.pid)
        maker.kill()
        maker.wait(DEADLINE)
    of_the_dead = f"shmsched-{dead}-{started}-0"
    of_the_living = f"shmsched-{os.getpid()}-{start_time(os.getpid())}-999999"
    # The process of this number is another one now: its maker is dead all the same.
    of_a_reused_pid = f"shmsched-{os.getpid()}-{start_time(os.getpid()) + 1}-0"
    names = (of_the_dead, of_the_living, of_a_reused_pid)
    try:
        for name in names:
            posix_ipc.SharedMemory("/" + name, flags=posix_ipc.O_CREX, mode=0o600, size=4096).close_fd()
        with shmsched.launch("echo"):
            assert shm_names() & set(names) == {of_the_living}
    finally:
        for name in shm_names() & set(names):
            posix_ipc.unlink_shared_memory("/" + name)


DAEMON = """
import sys
from pathlib import Path
from shmsched.daemon.running import run
from shmsched.daemon.config import ClientLimits, DaemonConfig, EngineConfig
client = ClientLimits(arena_bytes=int(sys.argv[2]), outstanding_results=int(sys.argv[3]))
engines = (EngineConfig(spec="echo"),)
sys.exit(run(DaemonConfig(socket=Path(sys.argv[1]), engines=engines, max_shared_memory=1 << 60, client=client)))
"""


def test_f3_a_full_dev_shm_is_a_clear_error_at_start_at_attach_and_at_the_first_raw_step(tmp_path: Path) -> None:
    """tmpfs takes a file of any size and gives SIGBUS where there is no page for it: so pages are asked for at once."""
    space = os.statvfs("/dev/shm")
    more_than_all = (space.f_blocks + 1) * space.f_frsize
    sizes = r"needs [\d,]{9,} bytes of shared memory; /dev/shm has [\d,]+ free of [\d,]{9,}"

    # Start: a batch slot takes some 70 bytes for each token.
    with pytest.raises(shmsched.EngineStartError, match=r"engine echo needs .* of shared memory; /dev/shm has"):
        shmsched.launch("echo", max_prefill_chunk_size=more_than_all // 128)

    # Attach: the ring of results takes 8 bytes for each.
    path = tmp_path / "attach.sock"
    with running("-c", DAEMON, str(path), "1", str(more_than_all // 8)) as daemon:
        with pytest.raises(shmsched.SharedMemoryError, match=f"client pid {os.getpid()} {sizes}"):
            shmsched.Client(socket=path, wait=DEADLINE)
        daemon.terminate()
        assert daemon.wait(DEADLINE) == 0

    # The first raw step; sampled ones go on.
    path = tmp_path / "raw.sock"
    with running("-c", DAEMON, str(path), str(more_than_all), "1000") as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == f"ready {path}\n"
        with shmsched.Client(socket=path, arena_bytes=more_than_all) as client, client.open_session() as session:
            with pytest.raises(
                shmsched.SharedMemoryError, match=f"the logits arena of client pid {os.getpid()} {sizes}"
            ):
                session.submit([1], sampling=None)
            assert session.submit([1]).result(DEADLINE).tokens.size == 1
        daemon.terminate()
        assert daemon.wait(DEADLINE) == 0


def test_f3_the_daemons_own_limit_is_a_clear_error_too() -> None:
    limit = 8 << 20
    named = r"arena of client .* of the daemon's 8,388,608 are in use"
    with (
        shmsched.launch("echo", max_shared_memory=limit) as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        with pytest.raises(shmsched.SharedMemoryError, match=named):
            session.submit([1], sampling=None)
        assert session.submit([1]).result(DEADLINE).tokens.size == 1


def test_f13_the_rows_of_a_stopped_engine_come_back_with_its_death() -> None:
    """Rule 3: the step times out, but its rows stay reserved until the engine is dead."""
    spec = f"{Path(sys.modules[Moody.__module__].__file__ or '')}:Moody?step_us=300000"
    with (
        shmsched.launch(spec, step_timeout_s=1.0) as cluster,
        cluster.client(arena_bytes=VOCAB * 4 + 2 * GUARD) as client,
    ):
        session = client.open_session()
        future = session.submit([1], sampling=None)
        wait_until(lambda: cluster.status()["engines"][0]["in_flight"], "the step to run")
        os.kill(cluster.status()["engines"][0]["pid"], signal.SIGSTOP)
        with pytest.raises(shmsched.EngineTimeout):
            future.result(DEADLINE)
        wait_until(lambda: held_rows(client) == 0, "the rows to come back")
        wait_until(
            lambda: [e["state"] for e in cluster.status()["engines"]] == ["ready"], "another engine to be started"
        )


@contextmanager
def connected_by_another_process(path: Path) -> Iterator[tuple[Link, subprocess.Popen[str]]]:
    """A connection to the daemon that we hold, and whose process by all that the daemon knows is another one.

    So that what it kills at a step time-out is neither the process that writes nor the one that runs the tests.
    """
    ours, theirs = socket.socketpair()
    program = (
        "import signal, socket, sys\n"
        "connection = socket.socket(socket.AF_UNIX)\n"
        "connection.connect(sys.argv[1])\n"
        "socket.send_fds(socket.socket(fileno=0), [b'.'], [connection.fileno()])\n"
        "connection.close()\n"
        "signal.pause()\n"
    )
    with ours, subprocess.Popen([sys.executable, "-c", program, str(path)], stdin=theirs, text=True) as process:
        theirs.close()
        try:
            ours.settimeout(DEADLINE)
            _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
            link = Link(Connection(fd))
            link.send(frames.Hello(frames.MAGIC, frames.MAJOR, frames.MINOR, frames.Role.ENGINE))
            yield link, process
        finally:
            process.kill()


@pytest.mark.parametrize("settled_by", ["time-out", "cancel", "close"])
def test_f13_rows_stay_held_as_long_as_the_writer_of_a_settled_step_lives(settled_by: str) -> None:
    """The daemon's SIGKILL at the time-out hits the process that connected; the one that writes, ours, lives for a while."""
    timeout = 2.0 if settled_by == "time-out" else 300.0
    with (
        shmsched.launch(step_timeout_s=timeout) as cluster,
        connected_by_another_process(cluster.socket) as (link, process),
        EngineByHand(cluster.socket, link) as stopped,
        cluster.client(arena_bytes=VOCAB * 4 + 2 * GUARD) as client,
    ):
        wait_until(lambda: "echo" in client.models, "the client to hear of the model")
        session = client.open_session()
        settled = session.submit([1], sampling=None)
        batch = stopped.work()
        late = stopped.row(stopped.steps()[0])
        late[: VOCAB // 2] = 1.0
        if settled_by == "time-out":
            with pytest.raises(shmsched.EngineTimeout):
                settled.result(DEADLINE)
            assert process.wait(DEADLINE) == -signal.SIGKILL
        elif settled_by == "cancel":
            assert settled.cancel()
        else:
            session.close()
            with pytest.raises(shmsched.SessionClosed):
                settled.result(DEADLINE)
        wait_until(lambda: not cluster.status()["ledger"]["in_flight"], "the step to be settled")
        with (
            connected_by_another_process(cluster.socket) as (another_link, _),
            EngineByHand(cluster.socket, another_link) as another,
        ):
            other = client.open_session()
            with pytest.raises(shmsched.Full, match="0 leases are held and 1 step is outstanding"):
                other.submit([2], sampling=None)
            late[VOCAB // 2 :] = 1.0
            if settled_by == "time-out":
                stopped.close()
            else:
                stopped.answer(batch)
            wait_until(lambda: held_rows(client) == 0, "the row to come back")
            future = other.submit([2], sampling=None)
            writer = {e.number: e for e in (stopped, another)}[other.engine]
            batch = writer.work()
            writer.row(writer.steps()[0])[:] = 2.0
            writer.answer(batch)
            mine = future.result(DEADLINE).logits
            assert mine is not None
            assert (mine.data == np.float32(2.0)).all()


def held_rows(client: shmsched.Client) -> int:
    arena = client._channel.arena
    assert arena is not None
    return arena._allocator.held


def test_f14_any_slice_of_logits_keeps_its_rows_while_others_come_and_go() -> None:
    """Only the array is kept; without a lease at its base its rows would go to a later step: the arena has but four."""
    with (
        shmsched.launch(f"echo?vocab={VOCAB}") as cluster,
        cluster.client(arena_bytes=4 * aligned(VOCAB * 4 + 2 * GUARD)) as client,
        client.open_session() as session,
    ):
        kept = session.submit([1], sampling=None).result(DEADLINE).logits.data[0, 10:]  # type: ignore[union-attr]
        gc.collect()
        before = kept.copy()
        for token in range(50):
            session.submit([token], sampling=None).result(DEADLINE)
            assert (kept == before).all()
        assert held_rows(client) <= 3
        del kept
        gc.collect()
        held = [session.submit([token], sampling=None).result(DEADLINE) for token in range(4)]
        with pytest.raises(shmsched.Full, match="4 leases are held"):
            session.submit([1], sampling=None)
        assert len(held) == 4

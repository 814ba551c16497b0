"""Signals as a parent left them, requests to stop at any moment, and what cleaners do to a socket."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import DEADLINE_S, SCRIPT, daemon, environment, no_traceback, running, shmsched

import shmsched as library

from processes.leftovers import wait_until

AT_ONCE_S = 20.0
"""Less than what it would wait for, a minute, on however busy a machine."""
SLOW = """
import time
from pathlib import Path
from shmsched.workers.echo import Echo


class Slow(Echo):
    def forward(self, batch):
        Path("running").touch()
        time.sleep(0.4)
        super().forward(batch)

    def close(self):
        Path("closed").touch()


class Loading(Echo):
    def start(self, limits):
        Path("loading").touch()
        time.sleep(60)
"""


def block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD})


def ignore() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def started(home: Path, prepare: Callable[[], None], *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [SCRIPT, *arguments],
        env=environment(home),
        cwd=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=prepare,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def socket_of(home: Path) -> Path:
    return home / "shmsched" / "default.sock"


@pytest.mark.parametrize("inherited", [block, ignore])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_the_parent_did_to_signals_changes_nothing(
    home: Path, inherited: Callable[[], None], number: signal.Signals
) -> None:
    with started(home, inherited, "up", "--engine", "nope") as up:
        _, err = up.communicate(timeout=DEADLINE_S)
        assert up.returncode == 1
        assert b"no engine is named 'nope'" in err
    with started(home, inherited, "up", "--engine", "echo") as up:
        assert up.stdout is not None
        assert up.stdout.readline().startswith(b"ready ")
        with library.Control(socket_of(home)) as control:
            os.kill(control.status()["engines"][0]["pid"], signal.SIGKILL)
            restarted = lambda: control.status()["workers"][0]["restarts"] == 1  # noqa: E731
            wait_until(restarted, "the engine's end to be seen", DEADLINE_S)
            assert "SIGKILL" in control.status()["workers"][0]["last_exit"]
        up.send_signal(number)
        assert up.wait(DEADLINE_S) == 0


def test_a_terminal_that_closes_is_a_request_to_stop_and_two_hang_ups_are_one(home: Path) -> None:
    with daemon(home, "--engine", "echo") as up, library.Client(socket=socket_of(home)) as client:
        session = client.open_session()
        up.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "may go on" in up.err, "the request to be taken")
        up.process.send_signal(signal.SIGHUP)
        for _ in range(20):
            session.submit([1]).result(DEADLINE_S)
        session.close()
        assert up.wait() == 0


def test_a_hang_up_that_was_ignored_stays_so(home: Path) -> None:
    """As under nohup."""
    with started(home, lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN) and None, "up", "--engine", "echo") as up:
        assert up.stdout is not None
        assert up.stdout.readline().startswith(b"ready ")
        up.send_signal(signal.SIGHUP)
        with library.Control(socket_of(home)) as control:
            assert control.status()["state"] == "running"
        up.send_signal(signal.SIGTERM)
        assert up.wait(DEADLINE_S) == 0


def runs_ours_and_heeds_requests(pid: int) -> bool:
    """Requests to stop are held back, or handled. ``unshare`` holds them back too, until just before it becomes our process."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    heeded = int(lines["SigBlk"], 16) | int(lines["SigCgt"], 16)
    return lines["Name"].strip() != "unshare" and bool(heeded >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_stop_at_any_moment_of_the_start_ends_it(home: Path, number: signal.Signals) -> None:
    """Before our code runs, it ends by the signal, and there is nothing yet; later with 0, and there is nothing any more."""
    statuses = []
    for delay in (0.0, 0.03, 0.1, 0.15, 0.2, 0.3, None):
        with started(home, lambda: None, "up", "--engine", "echo") as up:
            if delay is None:
                wait_until(lambda pid=up.pid: runs_ours_and_heeds_requests(pid), "our code to run", DEADLINE_S)  # type: ignore[misc]
            else:
                time.sleep(delay)
            up.send_signal(number)
            _, err = up.communicate(timeout=DEADLINE_S)
            assert no_traceback(err.decode())
            statuses.append(up.returncode)
            assert list(home.rglob("*.sock*")) == []
    assert set(statuses) <= {0, -number}
    assert statuses[-1] == 0


@pytest.mark.parametrize("command", [("up", "--engine", "echo"), ("engine", "echo", "--wait", "50")])
def test_process_1_ends_too(home: Path, command: tuple[str, ...]) -> None:
    """To process 1 the kernel gives no signal that it does not ask for. One that comes as its start has just begun counts."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-pf", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace may be made here")
    with subprocess.Popen([unshare, "-pf", "--kill-child", SCRIPT, *command], env=environment(home), cwd=home) as outer:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        wait_until(lambda: children.read_text().split(), "the process to be made")
        pid = int(children.read_text())
        wait_until(lambda: runs_ours_and_heeds_requests(pid), "the start to begin")
        os.kill(pid, signal.SIGTERM)
        assert outer.wait(DEADLINE_S) == 0
    assert list(home.rglob("*.sock*")) == []


def test_an_engine_that_is_loading_ends_with_a_daemon_that_is_told_to(home: Path) -> None:
    (home / "slow.py").write_text(SLOW)
    with running(home, "up", "--engine", "slow.py:Loading") as up:
        wait_until((home / "loading").exists, "the engine to load", DEADLINE_S)
        began = time.monotonic()
        up.process.send_signal(signal.SIGTERM)
        assert up.wait() == 0
        assert time.monotonic() - began < AT_ONCE_S, "it was waited for"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_engine_ends_after_the_batch_in_hand(home: Path, number: signal.Signals) -> None:
    (home / "slow.py").write_text(SLOW)
    with daemon(home), running(home, "engine", "slow.py:Slow") as engine:
        wait_until(lambda: shmsched(home, "status").returncode == 0, "the engine to be ready", DEADLINE_S)
        with library.Client(socket=socket_of(home)) as client:
            session = client.open_session(timeout=DEADLINE_S)
            step = session.submit([1])
            wait_until((home / "running").exists, "the batch to run", DEADLINE_S)
            engine.process.send_signal(number)
            assert step.result(DEADLINE_S).tokens.size == 1
            assert engine.wait() == (130 if number == signal.SIGINT else 0)
        assert (home / "closed").exists()
        assert no_traceback(engine.err)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_engine_that_waits_or_loads_ends_at_once(home: Path, number: signal.Signals) -> None:
    (home / "slow.py").write_text(SLOW)
    status = 130 if number == signal.SIGINT else 0
    with daemon(home):
        with running(home, "engine", "slow.py:Loading") as engine:
            wait_until((home / "loading").exists, "the engine to load", DEADLINE_S)
            engine.process.send_signal(number)
            assert engine.wait() == status
        with running(home, "engine", "slow.py:Slow") as engine:
            wait_until(lambda: shmsched(home, "status").returncode == 0, "the engine to be ready", DEADLINE_S)
            began = time.monotonic()
            engine.process.send_signal(number)
            assert engine.wait() == status
            assert time.monotonic() - began < AT_ONCE_S
            assert no_traceback(engine.err)


KEPT = (".* had been removed or taken; it is there again", "shmsched: cannot be reached at .* for now: .*")


def lost(home: Path, what: str) -> None:
    if what in ("socket", "both"):
        socket_of(home).unlink()
    if what in ("lock", "both"):
        socket_of(home).with_name("default.sock.lock").unlink()
    if what == "directory":
        socket_of(home).parent.rename(home / "gone")
        shutil.rmtree(home / "gone")


@pytest.mark.parametrize("what", ["socket", "lock", "both", "directory"])
def test_what_a_cleaner_removed_is_put_back(home: Path, what: str) -> None:
    with daemon(home, "--engine", "echo", prints=KEPT) as first:
        lost(home, what)
        second = shmsched(home, "up")
        assert second.returncode == 1
        assert f"the daemon with pid {first.process.pid} has {socket_of(home)}" in second.stderr
        lost(home, what)
        done = shmsched(home, "stop")
        assert (done.returncode, done.stderr) == (0, "")
        assert first.wait() == 0
        assert list(socket_of(home).parent.iterdir()) == []


def test_a_daemon_whose_path_was_taken_says_so_leaves_it_alone_and_has_it_again_afterwards(home: Path) -> None:
    path = socket_of(home)
    with daemon(home, "--engine", "echo", prints=KEPT) as first:
        first.process.send_signal(signal.SIGSTOP)
        lost(home, "both")
        try:
            refusal = shmsched(home, "status")
            assert "there is no such socket" in refusal.stderr
            with daemon(home) as second:
                first.process.send_signal(signal.SIGCONT)
                wait_until(
                    lambda: f"pid {second.process.pid} has {path}" in first.err, "the first to see it", DEADLINE_S
                )
                with library.Control(path) as control:
                    assert control.daemon_pid == second.process.pid
        finally:
            first.process.send_signal(signal.SIGCONT)

        def is_first() -> bool:
            try:
                with library.Control(path) as control:
                    return control.daemon_pid == first.process.pid
            except library.SchedulerUnreachable:
                return False

        wait_until(is_first, "the first to have its path again", DEADLINE_S)


def test_a_stopped_daemon_without_its_socket_is_told_from_none(home: Path) -> None:
    with daemon(home, prints=KEPT) as up:
        up.process.send_signal(signal.SIGSTOP)
        lost(home, "socket")
        done = shmsched(home, "stop")
        assert done.returncode == 3
        assert f"a daemon has {socket_of(home)} (pid {up.process.pid}), but no socket is there now" in done.stderr
        up.process.send_signal(signal.SIGCONT)
        wait_until(socket_of(home).exists, "the socket to be back")

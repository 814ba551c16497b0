"""``shmsched engine``."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from commands import daemon, no_traceback, running, shmsched

from shmsched import Client

from processes.leftovers import wait_until


def test_an_engine_attached_by_hand_serves_until_the_daemon_ends(home: Path) -> None:
    socket = home / "s"
    with (
        daemon(home, "--socket", str(socket)),
        running(home, "engine", "echo?model=hand", "--socket", str(socket)) as e,
    ):
        wait_until(
            lambda: shmsched(home, "status", "--socket", str(socket)).returncode == 0, "the engine to be ready", 30
        )
        with Client(socket=socket) as client, client.open_session(model="hand") as session:
            assert session.submit([1]).result(30).tokens.size == 1
        assert shmsched(home, "stop", "--socket", str(socket)).returncode == 0
        assert e.wait() == 0, e.err
        assert no_traceback(e.err)


def test_an_engine_waits_for_a_daemon_that_is_not_there_yet(home: Path) -> None:
    with running(home, "engine", "echo", "--wait", "50") as engine, daemon(home):
        wait_until(lambda: shmsched(home, "status").returncode == 0, "the engine to be ready", 30)
        engine.process.send_signal(signal.SIGINT)
        assert engine.wait() == 130, engine.err
        assert no_traceback(engine.err)
        wait_until(lambda: shmsched(home, "status").returncode == 1, "the daemon to see its engine end", 30)


@pytest.mark.parametrize("spec", ["echo", "no_such_engine", "no/such/file.py:Engine", "echo?vocab=x", "echo?vocab=-1"])
def test_an_engine_that_cannot_run_is_one_line(home: Path, spec: str) -> None:
    done = shmsched(home, "engine", spec)
    assert done.returncode == (3 if spec == "echo" else 1), "no daemon, or a fault of the engine's"
    assert done.stderr.startswith("shmsched: ")
    assert done.stderr.count("\n") == 1
    assert no_traceback(done.stderr)

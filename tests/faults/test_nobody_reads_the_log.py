"""Whoever read standard output or standard error has gone: nothing else changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import shmsched
from shmsched.client.control import Control
from shmsched.workers.echo import advance, answer

from processes.leftovers import wait_until

DEADLINE = 30.0
ENGINES = Path(__file__).parent.parent / "processes" / "engines.py"
DECODE, RAISE = 7, 100


@contextmanager
def up(socket: Path, spec: str, **streams: int) -> Iterator[subprocess.Popen[bytes]]:
    script = Path(sys.executable).with_name("shmsched")
    daemon = subprocess.Popen(
        [script, "up", "--socket", socket, "--engine", spec],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        **streams,
    )
    try:
        yield daemon
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(DEADLINE) == 0
    finally:
        daemon.kill()
        daemon.wait()


@pytest.fixture
def broken_pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def works(session: shmsched.Session) -> bool:
    return session.submit([DECODE]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [DECODE]), 1000)]


def test_a_daemon_whose_log_nobody_reads_still_buries_and_restarts_its_engines(
    tmp_path: Path, broken_pipe: int
) -> None:
    socket = tmp_path / "s"
    with (
        up(socket, f"{ENGINES}:Moody", stdout=subprocess.DEVNULL, stderr=broken_pipe),
        shmsched.Client(socket=socket, wait=DEADLINE) as client,
    ):
        with client.open_session() as session:
            assert works(session)
            (engine,) = status(socket)["engines"]
            os.kill(engine["pid"], signal.SIGKILL)
            wait_until(lambda: session.ended is not None, "the session to be lost")
        with client.open_session(timeout=DEADLINE) as session:
            assert works(session)
            # The host complains too, of what the engine raises, and goes on.
            with pytest.raises(shmsched.EngineError):
                session.submit([RAISE]).result(DEADLINE)
        with client.open_session(timeout=DEADLINE) as session:
            assert works(session)
        assert status(socket)["workers"][0]["restarts"] == 1


def test_a_daemon_that_nobody_told_to_say_when_it_is_ready_says_nothing_of_it(tmp_path: Path, broken_pipe: int) -> None:
    socket, log = tmp_path / "s", tmp_path / "log"
    with (
        log.open("wb") as err,
        up(socket, "echo?vocab=1000", stdout=broken_pipe, stderr=err.fileno()),
        shmsched.Client(socket=socket, wait=DEADLINE) as client,
        client.open_session() as session,
    ):
        assert works(session)
        session.close()
        client.close()
    (line,) = log.read_text().splitlines()  # what it is, and nothing else
    assert line.endswith(f" on {socket}")


def status(socket: Path) -> dict:  # type: ignore[type-arg]
    with Control(socket=socket) as control:
        return dict(control.status())

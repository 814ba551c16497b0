"""Standard streams that are closed, full, or read by nobody: commands end as others do, daemon and engines go on."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import DEADLINE_S, SCRIPT, daemon, environment

import shmsched

PRINTING = """
import os, sys
from shmsched.workers.echo import Echo


class E(Echo):
    def forward(self, batch):
        print("x" * 100_000)
        sys.stderr.write("y" * 100_000 + "\\n")
        super().forward(batch)

    def close(self):
        print("closed")
"""


@contextmanager
def up(home: Path, redirections: str, **streams: int) -> Iterator[subprocess.Popen[bytes]]:
    """``shmsched up`` under a shell's redirections, with an engine that prints much. It must end with 0."""
    (home / "printing.py").write_text(PRINTING)
    process = subprocess.Popen(
        ["bash", "-c", f"exec {SCRIPT} up --engine printing.py:E {redirections}"],
        env=environment(home),
        cwd=home,
        start_new_session=True,
        **streams,
    )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()


def answers(home: Path) -> int:
    """A step works. The engine's pid."""
    socket = home / "shmsched" / "default.sock"
    with shmsched.Client(socket=socket, wait=DEADLINE_S) as client, client.open_session(timeout=DEADLINE_S) as session:
        for _ in range(3):
            assert session.submit([1]).result(DEADLINE_S).tokens.size == 1
    with shmsched.Control(socket) as control:
        return int(control.status()["engines"][0]["pid"])


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_numbers_0_to_2_are_never_something_else(home: Path, closed: str) -> None:
    with up(home, closed, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        engine = answers(home)
        for pid in (process.pid, engine):
            assert [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in range(3)] == ["/dev/null"] * 3


def test_a_full_disk_takes_no_log_and_stops_nobody(home: Path) -> None:
    with up(home, ">/dev/full 2>/dev/full"):
        answers(home)


@pytest.mark.parametrize("reads", [True, False], ids=["nobody has it open", "nobody reads it"])
def test_a_pipe_that_nobody_reads_stops_nobody(home: Path, reads: bool) -> None:
    """Neither one whose reader has gone, nor one whose reader sleeps: it takes 64 KiB, and no more."""
    reading, writing = os.pipe()
    if reads:
        os.close(reading)
    try:
        with up(home, "", stdout=writing, stderr=writing):
            answers(home)
    finally:
        os.close(writing)
        if not reads:
            os.close(reading)


def run(home: Path, line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"],
        env=environment(home, S=SCRIPT),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


GONE = "| (exec <&-; sleep 0.1)"
NO_ROOM = "shmsched: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("command", ["status", "status --json", "status --watch", "status --watch --json", "up --help"])
def test_what_a_command_cannot_write_is_told_as_others_tell_it(home: Path, command: str) -> None:
    with daemon(home, "--engine", "echo"):
        done = run(home, f"$S {command} >/dev/full")
        assert (done.returncode, done.stderr) == (1, NO_ROOM)
        done = run(home, f"{{ sleep 0.2; exec $S {command}; }} {GONE}")
        assert (done.returncode, done.stderr) == (141, "")
        if "--watch" not in command:
            done = run(home, f"$S {command} >&-")
            assert (done.returncode, done.stderr) == (0, "")
            done = run(home, f"$S {command} <&- >&- 2>&-")
            assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("streams", [">/dev/full 2>/dev/full", "<&- >&- 2>&-", GONE])
def test_a_stop_that_cannot_say_so_is_a_stop(home: Path, streams: str) -> None:
    with daemon(home, "--engine", "echo") as running:
        done = run(home, f"{{ sleep 0.2; exec $S stop; }} {streams}")
        assert (done.returncode, done.stderr) == (0, "")
        assert running.wait() == 0


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
@pytest.mark.parametrize(
    ("command", "status"), [("status", 3), ("engine echo", 3), ("up --socket /proc/no/s", 1), ("--x", 2)]
)
def test_an_error_that_nobody_can_be_told_is_an_exit_status(
    home: Path, command: str, status: int, streams: str
) -> None:
    done = run(home, f"$S {command} {streams}")
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")

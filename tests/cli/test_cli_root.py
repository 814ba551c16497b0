"""The command line as a whole."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from commands import SCRIPT, environment, shmsched

from shmsched.cli.root import group
from shmsched.dataplane import BUILD

COMMANDS = ("up", "status", "stop", "engine", "generate", "demo", "stress", "bench")


def test_help_lists_every_command(home: Path) -> None:
    done = shmsched(home, "--help")
    assert done.returncode == 0
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout
    assert list(COMMANDS) == group.list_commands(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(home: Path, name: str) -> None:
    done = shmsched(home, name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: shmsched {name}")
    if name not in ("demo", "stress", "bench"):
        assert "SHMSCHED_SOCKET" in done.stdout


def test_version(home: Path) -> None:
    assert shmsched(home, "--version").stdout == f"shmsched, version {version('shmsched')}, {BUILD}\n"


def test_no_command_and_an_unknown_one_are_usage_errors(home: Path) -> None:
    assert shmsched(home).returncode == 2
    done = shmsched(home, "nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr


def test_listing_the_commands_loads_none_of_them() -> None:
    program = (
        "import sys; from shmsched.cli.root import run; run(['--help']);"
        "print([m for m in sys.modules if m.split('.')[0] in ('rich', 'asyncio')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr == "[]\n"


def test_a_reader_that_leaves_is_no_traceback(home: Path) -> None:
    command = f"{SCRIPT} up --help | true; {SCRIPT} --help | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command], env=environment(home), cwd=home, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""


@pytest.mark.parametrize("command", [("status",), ("stop",), ("engine", "echo"), ("generate", "Hello")])
def test_where_no_daemon_is_and_none_can_be(home: Path, command: tuple[str, ...]) -> None:
    (home / "file").touch()
    (home / "link").symlink_to("nowhere")
    for socket, said in (
        ("none", f"no daemon at {home}/none: there is no such socket. `shmsched up` starts one there"),
        (".", "names a directory; give it the name of a file in there"),
        ("..", "names a directory"),
        ("file", f"{home}/file exists and is not a socket; remove it or choose another path"),
        ("link", "exists and is not a socket"),
        ("missing/s", f"the socket's directory {home}/missing cannot be used: No such file or directory. Make it"),
        ("file/s", "cannot be used: Not a directory"),
        ("x" * 108, "takes at most 107"),
    ):
        done = shmsched(home, *command, "--socket", f"{home}/{socket}")
        assert done.returncode == 3, done.stderr
        assert done.stderr.startswith("shmsched: ")
        assert done.stderr.count("\n") == 1
        assert said in done.stderr
        assert ("shmsched up" in done.stderr) == (socket == "none")


@pytest.mark.parametrize(
    "command",
    [("up", "--engines", "0"), ("stress", "--clients", "0"), ("bench", "--scenario", "x"), ("status", "x"), ("nope",)],
)
def test_wrong_options_are_said_in_one_form(home: Path, command: tuple[str, ...]) -> None:
    done = shmsched(home, *command)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: shmsched ")
    assert done.stderr.splitlines()[-1].startswith("shmsched: ")
    assert "Error:" not in done.stderr


INTERRUPTED = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == at:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

at = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupts())
from shmsched.cli import main
main()
"""


@pytest.mark.parametrize(
    "module", ["surroundings", "cli.root", "cli.exits", "cli.status", "client.control", "wire.link"]
)
def test_an_interrupt_while_modules_are_loaded_leaves_no_trace(home: Path, module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, f"shmsched.{module}", "status"],
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (130, -signal.SIGINT)
    assert done.stderr.strip() == ""


def test_an_interrupt_that_the_parent_ignored_stays_so(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "shmsched.cli.root", "status"],
        env=environment(home),
        capture_output=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.returncode == 3

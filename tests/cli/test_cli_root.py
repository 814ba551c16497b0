"""The command line as a whole."""

from __future__ import annotations

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

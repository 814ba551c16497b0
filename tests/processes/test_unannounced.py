"""What processes print: known lines pass, a traceback or an unknown line makes a test fail that has not announced it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from processes.unannounced import unannounced

TRACEBACK = """\
Traceback (most recent call last):
  File "x.py", line 1, in turn
    y()

AttributeError: 'ClientLink' object has no attribute '_stream'"""
KNOWN = "shmsched: engine echo?vocab=5 (pid 12) ended while it ran batch 3: the peer closed the connection"
A_TEST = """
import subprocess
import sys

import pytest

SAYS = [sys.executable, "-c", "raise ValueError('from a process')"]


def test_quiet():
    subprocess.run([sys.executable, "-c", "import sys; print('shmsched: engine by hand (pid 1) ended: gone', file=sys.stderr)"])


def test_loud():
    subprocess.run(SAYS)


@pytest.mark.prints("ValueError: from a process")
def test_announced():
    subprocess.run(SAYS)
"""


def test_known_lines_pass_and_others_do_not() -> None:
    assert unannounced(f"{KNOWN}\n\n{KNOWN}\n") == []
    assert unannounced(f"{KNOWN}\nwhat is this\n{KNOWN}") == ["what is this"]


def test_a_traceback_is_one_thing_and_is_announced_by_its_last_line() -> None:
    assert unannounced(f"{KNOWN}\n{TRACEBACK}\n{KNOWN}") == [TRACEBACK]
    assert unannounced(f"{TRACEBACK}\n{TRACEBACK}", ["has no attribute '_stream'"]) == []
    assert unannounced(TRACEBACK, ["another"]) == [TRACEBACK]


def test_a_test_whose_processes_print_what_nobody_knows_fails(tmp_path: Path) -> None:
    tests = Path(__file__).parent.parent
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = prints")
    (tmp_path / "conftest.py").write_text((tests / "conftest.py").read_text())
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "test_it.py").write_text(A_TEST)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tests)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "3 passed, 1 error" in run.stdout, run.stdout + run.stderr
    assert "ERROR at teardown of test_loud" in run.stdout
    assert "nobody knows or announced it" in run.stdout
    assert "from a process" in run.stdout

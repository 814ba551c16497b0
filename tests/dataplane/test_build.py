"""What is built is of the sources that are there, all of it or nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shmsched import dataplane
from shmsched.dataplane import extensions

from processes.compiler import can_compile

PROGRAM = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from shmsched import dataplane
    from shmsched.dataplane import marks, queues
print(dataplane.BUILD, marks.NOTHING, "compiled" if "_compiled" in queues.__file__ else "interpreted")
print(*[warning.message for warning in caught])
"""


def asked(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def run(package: Path, **environment: str) -> tuple[str, str]:
    """What a process that imports this copy of the package says: which build it runs, and its warnings."""
    clean = {name: value for name, value in os.environ.items() if name != "SHMSCHED_INTERPRETED"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=package,
        env={**clean, "PYTHONPATH": str(package), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    build, warnings = done.stdout.splitlines()
    return build, warnings


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a copy of what is installed."""
    source = extensions.SOURCES.parent
    shutil.copytree(source, tmp_path / "shmsched", ignore=shutil.ignore_patterns("workers", "tools", "__pycache__"))
    return tmp_path


@pytest.fixture
def compiled(package: Path) -> Path:
    if extensions.state() is not extensions.State.FRESH:
        pytest.skip("nothing is compiled here")
    return package


@pytest.mark.skipif(not can_compile(), reason="there is no C compiler, or no Python.h")
@pytest.mark.skipif(asked("SHMSCHED_INTERPRETED") or asked("SHMSCHED_PURE"), reason="it is to run interpreted")
def test_where_there_is_a_compiler_the_tests_run_compiled() -> None:
    assert dataplane.BUILD == "compiled", f"{extensions.state().value}; `make build` builds the extensions"


def test_a_build_of_these_sources_runs_and_is_ignored_where_that_is_asked_for(compiled: Path) -> None:
    assert run(compiled) == ("compiled 0 compiled", "")
    assert run(compiled, SHMSCHED_INTERPRETED="1") == ("interpreted 0 interpreted", "")
    assert run(compiled, SHMSCHED_INTERPRETED="0") == ("compiled 0 compiled", "")


@pytest.mark.parametrize("name", ["queues.py", "line.pxd", "marks.pxd", "extensions.py"])
def test_a_build_of_other_sources_is_ignored_and_the_command_that_helps_is_named(compiled: Path, name: str) -> None:
    path = compiled / "shmsched" / "dataplane" / name
    path.write_text(path.read_text() + "\n# changed\n")
    build, warnings = run(compiled)
    assert build == "interpreted 0 interpreted"
    assert "`make build`" in warnings
    assert str(path.parent / "_compiled") in warnings


def test_a_newer_source_is_what_runs(compiled: Path) -> None:
    path = compiled / "shmsched" / "dataplane" / "marks.py"
    path.write_text(path.read_text().replace("NOTHING = 0", "NOTHING = -7"))
    assert run(compiled)[0] == "interpreted -7 interpreted"


@pytest.mark.parametrize("missing", [*extensions.MODULES, extensions.SHARED, "record"])
def test_a_build_of_which_a_part_is_missing_is_ignored(compiled: Path, missing: str) -> None:
    folder = compiled / "shmsched" / "dataplane" / "_compiled"
    (folder / (extensions.RECORD if missing == "record" else f"{missing}{extensions.SUFFIX}")).unlink()
    build, warnings = run(compiled)
    assert build == "interpreted 0 interpreted"
    assert "`make build`" in warnings


def test_a_record_that_cannot_be_read_is_of_other_sources(compiled: Path) -> None:
    record = compiled / "shmsched" / "dataplane" / "_compiled" / extensions.RECORD
    for content in (b"", b"3.3", b"3.3 0123", b"\xff\xfe", b"a b c"):
        record.write_bytes(content)
        assert run(compiled)[0] == "interpreted 0 interpreted"


def test_without_a_build_it_runs_interpreted_and_nothing_is_said(package: Path) -> None:
    shutil.rmtree(package / "shmsched" / "dataplane" / "_compiled", ignore_errors=True)
    assert run(package) == ("interpreted 0 interpreted", "")


def test_the_cython_that_it_was_built_by_counts() -> None:
    assert extensions.digest("3.3.0") != extensions.digest("3.3.1")

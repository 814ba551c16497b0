"""What is installed works outside the checkout: compiled where that is possible, interpreted where it is not, and never a mixture."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shmsched.dataplane import extensions

from processes.compiler import can_compile, command

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "shmsched/dataplane/_compiled/"
needs_a_compiler = pytest.mark.skipif(not can_compile(), reason="there is no C compiler, or no Python.h")
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
PROGRAM = """
import shmsched, shmsched.workers.gemma.config, shmsched.workers.gguf, shmsched.tools.load
from shmsched.dataplane import BUILD
print(shmsched.__file__, BUILD)
with shmsched.launch("echo") as cluster, cluster.client() as client, client.open_session() as session:
    print(session.submit([1, 2]).result(30).tokens.size)
"""

# With all processes of the suite at once, a compiler takes its time.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the checkout, with what an earlier build may have left in it."""
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "_compiled")
    for name in ("shmsched", "workers", "tools"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    tag = f"lib.linux-x86_64-cpython-{sys.version_info.major}{sys.version_info.minor}"
    for left in (f"build/{tag}", "build/lib"):
        for path in (f"{FOLDER}queues{extensions.SUFFIX}", f"{FOLDER}{extensions.RECORD}", "shmsched/gone.py"):
            (tree / left / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / left / path).touch()
    return tree


def wheel_of(tree: Path, **environment: str) -> tuple[Path, set[str]]:
    """A wheel, and what it holds of a build."""
    into = tree.parent / "wheels"
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", into, tree]
    subprocess.run(command, check=True, timeout=500, env={**os.environ, "SHMSCHED_PURE": "0", **environment})
    (wheel,) = into.glob("shmsched-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "shmsched/gone.py" not in names
    assert "shmsched/dataplane/queues.pxd" in names
    return wheel, {name.removeprefix(FOLDER) for name in names if name.startswith(FOLDER)}


def build_of(wheel: Path) -> str:
    """Which build runs where this is installed, once a step has gone through it."""
    site = wheel.parent.parent / "site"
    subprocess.run([*PIP, "install", "--no-deps", "--target", site, wheel], check=True, timeout=120)
    environment = {name: value for name, value in os.environ.items() if name != "SHMSCHED_INTERPRETED"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        cwd=site.parent,
        env={**environment, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    file, build, size = done.stdout.split()
    assert (file, size) == (str(site / "shmsched" / "__init__.py"), "1")
    return build


@needs_a_compiler
def test_with_a_compiler_everything_is_compiled(tree: Path) -> None:
    wheel, built = wheel_of(tree, CFLAGS="-O0")
    assert built == {path.name for path in extensions.outputs(Path())} | {extensions.RECORD}
    assert build_of(wheel) == "compiled"


@needs_a_compiler
def test_where_one_module_cannot_be_compiled_none_is(tree: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *rotation*) echo "no" >&2; exit 1;; esac\nexec {shlex.join(command())} "$@"\n'
    )
    compiler.chmod(0o755)
    wheel, built = wheel_of(tree, CFLAGS="-O0", CC=str(compiler))
    assert built == set()
    assert build_of(wheel) == "interpreted"


@pytest.mark.parametrize(
    "environment", [{"SHMSCHED_PURE": "1"}, {"CC": "/nowhere/cc"}], ids=["asked-for", "no-compiler"]
)
def test_without_extensions_it_runs_interpreted(tree: Path, environment: dict[str, str]) -> None:
    wheel, built = wheel_of(tree, **environment)
    assert built == set()
    assert build_of(wheel) == "interpreted"
    assert wheel.name.endswith("-none-any.whl") == ("SHMSCHED_PURE" in environment)

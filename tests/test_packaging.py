"""What is installed is what is in the tree, and the tree keeps to its own order."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKS = {"workers", "tools"}

# From below. A module imports from its own layer and from those below it.
LAYERS = [
    {"errors", "failpoints", "lazy_names", "limits", "locks", "not_copied", "saying", "surroundings"},
    {"arguments", "params", "futures"},
    {"steps"},
    {"dataplane"},
    {"scheduling"},
    {"memory"},
    {"wire"},
    {"engine"},
    {"client", "daemon", "workers"},
    {""},
    {"tools"},
    {"cli"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
APART = [{"client", "daemon"}, {"workers", "client"}, {"workers", "daemon"}]
"""Of one layer, and yet strangers to one another."""
OF_ENGINE_FOR_CLIENTS = {"shmsched.engine.contract", "shmsched.engine.sampling"}
BELOW_THE_CLOCK = {
    "asyncio",
    "mmap",
    "multiprocessing",
    "os",
    "posix_ipc",
    "select",
    "socket",
    "subprocess",
    "time",
}
"""What ``scheduling`` and ``dataplane`` do not know: clocks, processes, shared memory, I/O."""
CHOOSES_THE_BUILD = "shmsched.dataplane"
"""It alone looks at the environment."""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of the package: its name, its file."""
    for directory, name in (
        (ROOT / "shmsched", "shmsched"),
        *((ROOT / link, f"shmsched.{link}") for link in sorted(LINKS)),
    ):
        for path in sorted(directory.rglob("*.py")):
            if directory.name == "shmsched" and path.relative_to(directory).parts[0] in LINKS:
                continue
            parts = path.relative_to(directory).with_suffix("").parts
            yield ".".join([name, *(p for p in parts if p != "__init__")]), path


def test_the_list_of_packages_is_the_tree_s(project: dict[str, Any]) -> None:
    packages = {name for name, path in sources() if path.name == "__init__.py"}
    assert set(project["tool"]["setuptools"]["packages"]) == packages
    directories = {path.parent for _, path in sources()}
    assert all((directory / "__init__.py").exists() for directory in directories), "a folder without __init__.py"


def test_the_two_folders_at_the_top_are_linked_and_mapped(project: dict[str, Any]) -> None:
    assert project["tool"]["setuptools"]["package-dir"] == {f"shmsched.{name}": name for name in LINKS}
    for name in LINKS:
        link = ROOT / "shmsched" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name
        assert (link / "__init__.py").is_file()


def test_the_version_is_said_once_more_in_the_package(project: dict[str, Any]) -> None:
    import shmsched

    assert shmsched.__version__ == project["project"]["version"]


def test_types_are_promised(project: dict[str, Any]) -> None:
    assert (ROOT / "shmsched" / "py.typed").is_file()
    data = {"shmsched": ["py.typed"], "shmsched.dataplane": ["*.pxd"]}
    assert project["tool"]["setuptools"]["package-data"] == data


@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("shmsched", {"numpy", "posix_ipc"}),
        ("shmsched.daemon.running", {"posix_ipc"}),
        ("shmsched.engine.host", {"numpy", "posix_ipc"}),
        ("shmsched.engine", {"numpy", "posix_ipc"}),
        ("shmsched.workers.echo", {"numpy", "posix_ipc"}),
    ],
)
def test_importing_needs_little(module: str, needs: set[str], tmp_path: Path) -> None:
    """The daemon computes nothing: without numpy it is there an eighth of a second sooner, and holds 12 MB less."""
    code = (
        "import sys; before = set(sys.modules)\n"
        f"import {module}\n"
        "new = [sys.modules[name] for name in set(sys.modules) - before]\n"
        # Cython enters some that are none.
        "new = {module.__name__.partition('.')[0] for module in new if getattr(module, '__spec__', None)}\n"
        "print(*sorted(new - sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert set(done.stdout.split()) <= {*needs, "shmsched", "__mp_main__"}


def imported(path: Path, module: str) -> Iterator[str]:
    """The modules that it imports, those for type checking among them."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    known = {name for name, _ in sources()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                )
            # ``from package import module`` names the module.
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base


def part_of(module: str) -> str:
    """``client`` of ``shmsched.client.session``; empty for ``shmsched`` itself."""
    return [*module.split("."), ""][1]


MODULES = dict(sources())


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards(module: str) -> None:
    mine = part_of(module)
    assert mine in LEVEL, f"{module} has no place in the house"
    for other in imported(MODULES[module], module):
        if other.partition(".")[0] != "shmsched":
            if mine in ("scheduling", "dataplane") and module != CHOOSES_THE_BUILD:
                assert other.partition(".")[0] not in BELOW_THE_CLOCK, f"{module} imports {other}"
            continue
        theirs = part_of(other)
        assert LEVEL[theirs] <= LEVEL[mine], f"{module} imports {other}, which stands above it"
        assert {mine, theirs} not in APART, f"{module} imports {other}"
        if mine == "client" and theirs == "engine":
            assert other in OF_ENGINE_FOR_CLIENTS, f"{module} imports {other}"


IN_CIRCLES = {"shmsched.client.generation.generation", "shmsched.client.session"}
"""A session makes its generations, and these know their session."""


def test_no_module_leads_back_to_itself() -> None:
    """Imports within functions and for type checking count."""
    down = {module: set(imported(path, module)) - {module} for module, path in MODULES.items()}
    up: dict[str, set[str]] = {module: set() for module in MODULES}
    for module, others in down.items():
        for other in others & MODULES.keys():
            up[other].add(module)
    left = set(MODULES)
    # Whoever imports nobody that is left, or is imported by nobody, is in no circle.
    while outside := {module for module in left if not down[module] & left or not up[module] & left}:
        left -= outside
    assert left <= IN_CIRCLES, sorted(left - IN_CIRCLES)


def test_the_check_of_imports_sees_all_forms(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "import os.path\nfrom shmsched.wire import frames\nfrom shmsched.errors import Full\n"
        "def f():\n    from . import session\n    from ..daemon.loop import EventLoop\n"
        "if TYPE_CHECKING:\n    import shmsched.cli\n"
    )
    assert set(imported(path, "shmsched.client.x")) == {
        "os.path", "shmsched.wire.frames", "shmsched.errors", "shmsched.client.session", "shmsched.daemon.loop", "shmsched.cli",
    }  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_files_stay_small_enough_to_hold_in_the_head(module: str) -> None:
    n = len(MODULES[module].read_text().splitlines())
    assert n < 400, f"{MODULES[module].relative_to(ROOT)} has {n} lines"


# --- names that are imported when they are used ---------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["shmsched", "shmsched.client", "shmsched.engine", "shmsched.scheduling"])
def test_every_name_of_a_package_is_there_whatever_was_imported_before(package: str) -> None:
    """Each in front of all others once: a module of the same name would take its place."""
    code = f"""
import importlib, sys, types
names = importlib.import_module({package!r}).__all__
for first in names:
    for module in [m for m in sys.modules if m.partition(".")[0] == "shmsched"]:
        del sys.modules[module]
    package = importlib.import_module({package!r})
    for name in [first, *names]:
        assert not isinstance(getattr(package, name), types.ModuleType), (first, name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_is_none_is_none() -> None:
    import shmsched

    with pytest.raises(AttributeError, match="module 'shmsched' has no attribute 'Sheduler'"):
        shmsched.Sheduler  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("process", "other"),
    [("daemon", "client"), ("daemon", "engine.host"), ("engine", "client"), ("engine", "daemon")],
)
def test_a_process_imports_nothing_of_the_others(process: str, other: str) -> None:
    """It would start a third of a second later."""
    code = f"import sys, shmsched.{process}.__main__; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert f"shmsched.{process}.__main__" in modules
    assert [m for m in modules if m == f"shmsched.{other}" or m.startswith(f"shmsched.{other}.")] == []

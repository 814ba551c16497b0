"""The compiled form of the modules in this folder: which, how, where it lies, and whether it is of these sources.

``setup.py`` runs this file by itself, where nothing is installed: it imports the standard library alone.
"""

from __future__ import annotations

from enum import Enum
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

MODULES = (
    "admission",
    "answers",
    "batches",
    "client_port",
    "completions",
    "core",
    "forward",
    "ledger",
    "line",
    "queues",
    "rings",
    "rotation",
    "session",
    "session_core",
    "step",
    "submission",
)
"""What Cython compiles: all of these or none. Each has a ``.pxd`` beside it."""
SHARED = "_shmsched_dataplane"
"""One module more, for what Cython would otherwise put into each. Cython enters it without its package's name, too."""
NOT_COMPILED = ("descriptors", "dtypes", "extensions", "layouts", "marks", "tokens")
DIRECTIVES = {
    "language_level": 3,
    "annotation_typing": False,  # the .pxd has the types; those of the .py would collide with them
    "boundscheck": True,
    "nonecheck": True,  # else a None in a typed place is written to
    "wraparound": False,
    "cdivision": False,
    "auto_pickle": False,
}
COMPILER_FLAGS = ("-g0", "-O1")

SOURCES = Path(__file__).resolve().parent
FOLDER = SOURCES / "_compiled"
SUFFIX = EXTENSION_SUFFIXES[0]
RECORD = f"built{SUFFIX}.txt"
"""Cython's version, and the digest of what was compiled. Every interpreter has its own, so one checkout serves several."""


class State(Enum):
    ABSENT = "never built, or built without a C compiler"
    STALE = "of other sources than those here"
    FRESH = "of these sources"


def state() -> State:
    """What there is of it for this interpreter."""
    try:
        cython, built_from = (FOLDER / RECORD).read_text().split()
    except FileNotFoundError:
        return State.STALE if any(path.exists() for path in outputs(FOLDER)) else State.ABSENT
    except (OSError, ValueError):
        return State.STALE
    complete = all(path.exists() for path in outputs(FOLDER))
    return State.FRESH if complete and built_from == digest(cython) else State.STALE


def outputs(folder: Path) -> list[Path]:
    """The extensions for this interpreter."""
    return [folder / f"{name}{SUFFIX}" for name in (*MODULES, SHARED)]


def digest(cython: str) -> str:
    """Over all that the extensions are made from: the sources, their types, how they are compiled, and by which Cython."""
    sum_of_all = sha256(cython.encode())
    for name in sorted(
        [f"{module}.py" for module in (*MODULES, *NOT_COMPILED)] + [f"{module}.pxd" for module in (*MODULES, "marks")]
    ):
        content = (SOURCES / name).read_bytes()
        sum_of_all.update(f"{name} {len(content)}\n".encode() + content)
    return sum_of_all.hexdigest()


def remove(folder: Path) -> None:
    """What an earlier build left there for this interpreter. First what says that it may be used."""
    for path in (folder / RECORD, *outputs(folder)):
        path.unlink(missing_ok=True)


def record(folder: Path, cython: str) -> None:
    """All extensions are there, made by this version of Cython."""
    (folder / RECORD).write_text(f"{cython} {digest(cython)}\n")

"""Engines given as files, as modules of their own: ``shmsched.engine.files.<name>_<the path, in hexadecimal>``.

Under its own name a file would stand in for an installed module that is called like it, for the file's own imports as well. The
module is found by its name alone, so another process (a spawned pool's) can unpickle what is defined there.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

__path__: list[str] = []
"""What makes this module a package, whose modules are looked for by the finder below."""


def load(path: Path) -> ModuleType:
    """Import the file. Raises what its code raises."""
    file = path.resolve()
    return importlib.import_module(f"{__name__}.{re.sub('[^0-9A-Za-z]', '_', file.stem)}_{os.fsencode(file).hex()}")


def importable_beside(path: Path) -> None:
    """What lies beside the file, or beside a link to it, can be imported after all that is installed."""
    for directory in (path.resolve().parent, path.absolute().parent):
        importable(str(directory))


def importable(directory: str) -> None:
    """Nothing in ``directory`` stands in for what was importable before."""
    if directory not in sys.path:
        sys.path.append(directory)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        encoded = name.rpartition("_")[2]
        if package != __name__ or not re.fullmatch("([0-9a-f]{2})+", encoded):
            return None
        return spec_from_file_location(fullname, os.fsdecode(bytes.fromhex(encoded)))


sys.meta_path.append(_Finder())

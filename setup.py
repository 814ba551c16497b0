"""Compiles the data plane where that is possible. Everything else about the package is in pyproject.toml.

All extensions are built, or none: what fails takes the others with it, and the package runs interpreted then. ``SHMSCHED_PURE=1``
leaves them out.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

PACKAGE = "shmsched.dataplane"
SOURCES = Path("shmsched", "dataplane")
dataplane = runpy.run_path(str(SOURCES / "extensions.py"))
PURE = os.environ.get("SHMSCHED_PURE", "0") not in ("", "0")


class BuildSources(build_py):
    """First removes what an earlier build has left where this one puts its own."""

    def run(self) -> None:
        if self.editable_mode:
            dataplane["remove"](dataplane["FOLDER"])
        else:
            shutil.rmtree(Path(self.build_lib, "shmsched"), ignore_errors=True)
        super().run()


class BuildExtensions(build_ext):
    """Puts the extensions into a folder of their own, from where ``shmsched.dataplane`` takes them if they are of its sources."""

    def run(self) -> None:
        places = [Path(self.build_lib, *PACKAGE.split("."), "_compiled")]
        if self.inplace:
            places.append(dataplane["FOLDER"])
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
            dataplane["remove"](place)
        try:
            version = self.translate()
            super().run()
        except Exception as e:
            print(f"shmsched: the data plane is not compiled: {type(e).__name__}: {e}", file=sys.stderr)
            version = ""
        for place in places:
            if version and all(path.exists() for path in dataplane["outputs"](place)):
                dataplane["record"](place, version)
            else:
                print("shmsched: not everything could be compiled; it runs interpreted", file=sys.stderr)
                dataplane["remove"](place)

    def translate(self) -> str:
        """From Python to C. Returns Cython's version."""
        import Cython
        from Cython.Build import cythonize

        temporary = Path(self.build_temp, "dataplane")
        temporary.mkdir(parents=True, exist_ok=True)
        # Under the name by which they are imported, which is not where they lie.
        modules = [Extension(f"{PACKAGE}.{name}", [str(SOURCES / f"{name}.py")]) for name in dataplane["MODULES"]]
        shared = f"{PACKAGE}.{dataplane['SHARED']}"
        translated = cythonize(
            [*modules, Extension(shared, [str(temporary / f"{dataplane['SHARED']}.c")])],
            build_dir=str(temporary),
            force=True,
            compiler_directives=dataplane["DIRECTIVES"],
            shared_utility_qualified_name=shared,
        )
        sources = {extension.name.rpartition(".")[2]: extension.sources for extension in translated}
        for extension in self.extensions:
            extension.sources = sources[extension.name.rpartition(".")[2]]
        return str(Cython.__version__)


def extension(name: str) -> Extension:
    # Optional: so says setuptools of what may be missing in the end.
    flags = list(dataplane["COMPILER_FLAGS"])
    source = SOURCES / f"{name}.py" if name in dataplane["MODULES"] else SOURCES / "extensions.py"
    return Extension(f"{PACKAGE}._compiled.{name}", [str(source)], extra_compile_args=flags, optional=True)


setup(
    ext_modules=[] if PURE else [extension(name) for name in (*dataplane["MODULES"], dataplane["SHARED"])],
    cmdclass={"build_py": BuildSources, "build_ext": BuildExtensions},
)

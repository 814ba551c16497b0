"""Whether extensions can be built here."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sysconfig


def command() -> list[str]:
    """The C compiler that setuptools would call."""
    return shlex.split(os.environ.get("CC") or str(sysconfig.get_config_var("CC") or "cc"))


@functools.cache
def can_compile() -> bool:
    """Whether there is one, and Python's headers."""
    include = f"-I{sysconfig.get_path('include')}"
    try:
        done = subprocess.run(
            [*command(), include, "-fsyntax-only", "-xc", "-"],
            input=b"#include <Python.h>\n",
            capture_output=True,
            timeout=60,
        )
    except OSError:
        return False
    return done.returncode == 0

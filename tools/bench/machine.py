"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("shmsched", "numpy", "pyzmq", "msgspec")


def machine() -> dict[str, str]:
    """The processor, the system, the versions of what takes part, and how busy others kept the machine in the last minute."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    cores = len(os.sched_getaffinity(0))
    return {
        "processor": f"{found[1] if found else platform.machine()}, {cores} cores",
        "system": f"Linux {platform.release()}",
        "python": sys.version.split()[0],
        "load average": f"{os.getloadavg()[0]:.1f} before",
        **{name: version(name) for name in PACKAGES},
    }

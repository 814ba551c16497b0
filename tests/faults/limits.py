"""Having a process lack something until the end of a block."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PIDS = Path("/sys/fs/cgroup/pids")


@contextmanager
def limited(pid: int, limit: int, most: int) -> Iterator[None]:
    """The process is allowed ``most`` until the end of the block."""
    soft, hard = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (most, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, limit, (soft, hard))


def with_descriptors_left(pid: int, n: int) -> int:
    """The limit that leaves the process ``n`` descriptors."""
    listed = list(Path(f"/proc/{pid}/fd").iterdir())
    # Our own listing is over by now.
    used = {int(path.name) for path in listed if path.is_symlink()}
    free = [fd for fd in range(max(used) + n + 2) if fd not in used]
    return free[n]


def address_space(pid: int) -> int:
    """Bytes that the process has mapped."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


@contextmanager
def no_further_process(pid: int) -> Iterator[None]:
    """The process, and what it starts, can start no further process or thread. Skips where no control group can be made."""
    group = PIDS / f"shmsched-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as e:
        pytest.skip(f"no control group can be made at {group}: {e}")
    try:
        (group / "cgroup.procs").write_text(str(pid))
        # What it has already, it keeps.
        (group / "pids.max").write_text("1")
        yield
    finally:
        for member in (group / "cgroup.procs").read_text().split():
            (PIDS / "cgroup.procs").write_text(member)
        group.rmdir()

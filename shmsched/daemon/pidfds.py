"""Descriptors that say when a peer's process has ended, whoever else holds its socket open."""

from __future__ import annotations

import os

from shmsched.errors import ProtocolError, SystemLimit
from shmsched.limits import is_shortage, lacking


def pidfd_of(pid: int, whose: str) -> int:
    """A pidfd of the process of a peer, or -1 where this PID namespace does not see it: then its end of file alone tells.

    Raises ProtocolError if the process has ended already, SystemLimit if there is no descriptor.
    """
    if pid <= 0:
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError as e:
        what = f"the {whose} process {pid} cannot be watched"
        if is_shortage(e):
            raise SystemLimit(f"{what}: {lacking(e)}") from e
        raise ProtocolError(f"{what}: {e.strerror}") from e

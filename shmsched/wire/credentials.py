"""Who is at the other end of a Unix socket, by the kernel's word."""

from __future__ import annotations

import os
import socket
import struct

from shmsched.errors import ProtocolError

_CREDENTIALS = struct.Struct("3i")


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """pid, uid and gid of the process at the other end, as the kernel knows them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def name_of(pid: int) -> str:
    """How messages name a process. The kernel gives 0 for one that this PID namespace does not see."""
    return f"pid {pid}" if pid > 0 else "in another PID namespace"


def refuse_other_users(uid: int) -> None:
    """Raises ProtocolError if the peer runs as another user."""
    if uid != os.geteuid():
        raise ProtocolError(f"the peer runs as user {uid}; this socket serves user {os.geteuid()} only")

"""A connection to the daemon, made by hand."""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import Any, Self

from shmsched.wire import frames
from shmsched.wire.codec import pack, unpack
from shmsched.wire.framing import FrameSplitter, framed


class Stranger:
    """A connection. It has said nothing yet."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.setblocking(False)
        try:
            self.sock.connect(path)
        except OSError:
            self.sock.close()
            raise
        self._splitter = FrameSplitter()
        self._descriptors: list[int] = []
        self.reads = True
        self.gone = False
        """The daemon has closed the connection."""
        self.memory: Any = None
        """The segment that the daemon gave it."""

    def say(self, message: Any) -> None:
        self.say_bytes(framed(pack(message)))

    def say_bytes(self, data: bytes) -> None:
        try:
            self.sock.send(data)
        except OSError:
            # Full, or the daemon has let it go.
            pass

    def say_with_descriptors(self, message: Any, n: int) -> None:
        """Descriptors that nobody asked for ride on the frame."""
        try:
            self.sock.sendmsg(
                [framed(pack(message))],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.sock.fileno()] * n))],
            )
        except OSError:
            # The daemon has let it go.
            pass

    def read(self) -> None:
        """Take what the daemon has said: whatever was said to the daemon, its own frames are whole and right."""
        while True:
            try:
                data, ancillary, _, _ = self.sock.recvmsg(1 << 16, socket.CMSG_SPACE(64), socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                self.gone = True
                return
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._descriptors.extend(struct.unpack(f"{len(content) // 4}i", content))
            if not data:
                self.gone = True
                return
            for payload in self._splitter.feed(data):
                self.heard(unpack(payload))

    def heard(self, message: Any) -> None:
        """A frame from the daemon."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def descriptor(self) -> int:
        return self._descriptors.pop(0)

    def close(self) -> None:
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors.clear()
        self.memory = None
        self.sock.close()


def hello(role: int) -> frames.Hello:
    return frames.Hello(frames.MAGIC, frames.MAJOR, frames.MINOR, role)


class ControlPeer(Stranger):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.say(hello(frames.Role.CONTROL))

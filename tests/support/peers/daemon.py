"""A daemon that says the same to whoever comes."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

DEADLINE = 30.0


class Answering:
    """A socket on which whoever connects gets these bytes, and then the end of the stream."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        os.chmod(path, 0o600)
        self._listener.listen(64)
        self._data = data
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                peer.recv(1 << 16)
                peer.sendall(self._data)

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(DEADLINE)

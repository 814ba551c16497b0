"""How a client process hears its parent, and tells it something."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

ORPHAN_S = 10.0


class Teller:
    """Writes messages to the parent."""

    def __init__(self) -> None:
        # Whatever prints to standard output, an import say, must not get in between.
        self._fd = os.dup(1)
        os.dup2(2, 1)

    def __call__(self, kind: str, **message: Any) -> None:
        data = json.dumps({"kind": kind, **message}).encode() + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]


class Orders:
    """Lines from the parent. Read without ``sys.stdin``, whose lock a waiting daemon thread would hold at exit."""

    def __init__(self) -> None:
        self._data = b""

    def next(self) -> str:
        """The next line; empty at the end."""
        while b"\n" not in self._data:
            data = os.read(0, 4096)
            if not data:
                return ""
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        return line.decode()


def watch_parent(orders: Orders, stop: Callable[[], None], go: threading.Event) -> None:
    """Call ``stop`` when the parent wants no more, or is gone. In a thread of its own."""
    while order := orders.next():
        if order == "stop":
            stop()
        go.set()
    stop()
    go.set()
    # The driver ends now; if it cannot, nobody is left who would end it.
    time.sleep(ORPHAN_S)
    os._exit(3)

"""Asking a daemon how it is, and telling it to stop."""

from __future__ import annotations

import json
import math
import os
import time
from typing import Any

from shmsched.arguments import LONGEST_S, number, path, waiting, whole
from shmsched.client.flows import driven, hearing, wait_for_link
from shmsched.errors import ProtocolError, SchedulerDied, error_of
from shmsched.not_copied import NotCopied
from shmsched.wire import frames
from shmsched.wire.credentials import name_of
from shmsched.wire.link import Link
from shmsched.wire.socket_path import default_socket

ANSWER_S = 10.0


class Control(NotCopied):
    """A control connection, for one question after the other. Not thread-safe."""

    def __init__(self, socket: str | os.PathLike[str] | None = None, *, wait: float = 0.0) -> None:
        where = str(default_socket()) if socket is None else path("socket", socket)
        self._link = Link.connect(where, frames.Role.CONTROL, number("wait", wait, 0, float("inf")))
        self.daemon_pid = self._link.peer_pid

    def status(self, *, batches: int = 0) -> dict[str, Any]:
        """The daemon's status document; ``batches``: how many of each engine's last batches to include (at most 256)."""
        batches = whole("batches", batches, 0, 2**31 - 1)
        answer: dict[str, Any] = json.loads(self._ask(frames.AskStatus(batches), frames.Status).document)
        return answer

    def stop(self, *, drain_s: float | None = None) -> float:
        """Tell the daemon to stop; a second time, at once. Returns how long it lets open sessions go on, in seconds."""
        wait = -1.0 if drain_s is None else number("drain_s", drain_s, 0, LONGEST_S, where="or None")
        drain: float = self._ask(frames.Stop(wait), frames.Stopping).drain_s
        return drain

    def wait_closed(self, timeout: float) -> bool:
        """Wait until the daemon has ended. False if it still runs after ``timeout`` seconds."""
        wait = waiting("timeout", timeout)
        deadline = time.monotonic() + (math.inf if wait is None else wait)
        while (left := deadline - time.monotonic()) > 0:
            if self._link.receive(min(left, LONGEST_S)) is None:
                return True
        return False

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: Any, kind: type[Any]) -> Any:
        try:
            self._link.send(question)
        except SchedulerDied:
            # A daemon that refuses the connection has said why before it closed it.
            pass

        def hear(arrived: list[Any]) -> Any:
            if not arrived:
                return None
            message = arrived[0]
            if isinstance(message, frames.Refused):
                raise error_of(message.code, message.message)
            if not isinstance(message, kind):
                raise ProtocolError(f"the daemon answered with a {type(message).__name__} frame")
            return message

        closed = "the daemon closed the connection before it answered"
        silent = f"the daemon ({name_of(self.daemon_pid)}) did not answer"
        return driven(hearing(self._link, hear, ANSWER_S, closed, silent), wait_for_link)

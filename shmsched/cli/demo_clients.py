"""The demo's client processes, seen from the demo."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from shmsched.cli.exits import Failed

CONNECT_S = 60.0
END_S = 5.0


class ClientProcess:
    """One process, and the lines that it has begun."""

    def __init__(self, orders: dict[str, Any]) -> None:
        # A session of its own: Ctrl-C is the demo's to handle.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shmsched.cli.demo_client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._partial = b""
        self.tell(json.dumps(orders))

    @property
    def output(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            pass  # it has ended; reading says why

    def read(self) -> list[dict[str, Any]] | None:
        """The events that have arrived; None at the end."""
        data = os.read(self.output, 1 << 16)
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class ClientProcesses:
    """``sessions[c]`` are the orders for the sessions of client c.

    Once all are connected the first starts, and each of the others when the one before it has its first token: so one sees
    prefill join decodes that run already.
    """

    def __init__(self, socket: Path, sessions: list[list[dict[str, Any]]], settings: dict[str, Any]) -> None:
        self._selector = selectors.DefaultSelector()
        self._clients: list[ClientProcess] = []
        self._to_start: list[ClientProcess] = []
        self._started: ClientProcess | None = None
        try:
            for orders in sessions:
                client = ClientProcess({"socket": str(socket), "sessions": orders, **settings})
                self._clients.append(client)
                self._selector.register(client.output, selectors.EVENT_READ, client)
            self._wait_connected()
        except BaseException:
            self.close()
            raise
        self._to_start = self._clients[::-1]
        self._start_next()

    @property
    def running(self) -> bool:
        return bool(self._selector.get_map())

    def events(self, timeout: float) -> list[dict[str, Any]]:
        """What they say within ``timeout`` seconds, as soon as one says something. Raises Failed if one says an error."""
        events = []
        for key, _ in self._selector.select(timeout):
            client: ClientProcess = key.data
            said = client.read()
            if said is None:
                self._selector.unregister(client.output)
                if (status := client.process.wait()) != 0:
                    raise Failed(f"client process {client.process.pid} ended with exit status {status}")
            for event in said or ():
                if "error" in event:
                    raise Failed(f"client process {client.process.pid}: {event['error']}")
                if "time" in event and client is self._started:
                    self._start_next()
                events.append(event)
        return events

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._selector.close()

    def __enter__(self) -> ClientProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_next(self) -> None:
        self._started = self._to_start.pop() if self._to_start else None
        if self._started is not None:
            self._started.tell("go")

    def _wait_connected(self) -> None:
        deadline = time.monotonic() + CONNECT_S
        waiting = len(self._clients)
        while waiting:
            if time.monotonic() >= deadline:
                raise Failed(
                    f"{waiting} of {len(self._clients)} client processes did not connect within {CONNECT_S:g} s"
                )
            waiting -= len(self.events(deadline - time.monotonic()))

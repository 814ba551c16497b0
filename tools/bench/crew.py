"""The host of one contestant: it starts the processes that do the job, and the clients, and orders these."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any

from shmsched.tools.bench.plan import Plan, Round, RoundResult, Tally

START_S = 30.0
SLACK_S = 40.0
"""How much longer than its round a client may take: longer than one answer may."""

Rounds = Callable[[Round], Tally]
"""Runs a round with one client."""
Open = Callable[[int], AbstractContextManager[Rounds]]
"""Connects as client number ``i`` and opens its sessions. Runs in the client's own process, or thread."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class BenchFault(Exception):
    """A contestant does not do its job."""


def host() -> None:
    """The main function. Its plan and its rounds come on the connection that the last argument numbers; it ends when that does,
    and with it all that it started."""
    with Connection(int(sys.argv[-1])) as line, ExitStack() as stack:
        plan: Plan = line.recv()
        crew = Crew(plan)
        peer = importlib.import_module(f"shmsched.tools.bench.peers.{plan.transport.value}")
        socket: str | None = peer.start(plan, crew, stack)
        crew.wait_ready()
        tell(line, (socket, crew.processes))
        for when in _orders(line):
            tell(line, RoundResult.of(crew.run(when)))


def tell(line: Connection, what: Any) -> None:
    """Where nobody listens any more, hearing tells."""
    try:
        line.send(what)
    except ConnectionError:
        pass


def hear(line: Connection, name: str, seconds: float) -> Any:
    """The next that is said. Raises BenchFault if nothing is in time, or ever will be."""
    if not line.poll(max(0.0, seconds)):
        raise BenchFault(f"{name} said nothing for {seconds:.0f} s")
    try:
        return line.recv()
    except (EOFError, ConnectionError):
        raise BenchFault(f"{name} ended early; what it said is on standard error") from None


class Crew:
    """The clients; and all processes by what they are: client, scheduler or engine."""

    def __init__(self, plan: Plan) -> None:
        self.processes: dict[str, list[int]] = {}
        self._plan = plan
        self._lines: list[Connection] = []

    def start(self, role: str, main: Callable[[], None]) -> None:
        """Fork a process that ends with this one."""
        process = multiprocessing.get_context("fork").Process(target=_below, args=(os.getpid(), main), daemon=True)
        process.start()
        assert process.pid is not None
        self.knows(role, process.pid)

    def knows(self, role: str, pid: int) -> None:
        """This one does a part of the job too."""
        self.processes.setdefault(role, []).append(pid)

    def fork(self, open_client: Open) -> None:
        """Start each client as a process of its own."""
        for index in range(self._plan.clients):
            theirs = self._new_line()
            self.start("client", partial(_serve, theirs, open_client, index))
            theirs.close()

    def spawn_threads(self, open_client: Open) -> None:
        """Start each client as a thread."""
        for index in range(self._plan.clients):
            threading.Thread(target=_serve, args=(self._new_line(), open_client, index), daemon=True).start()

    def wait_ready(self) -> None:
        """Raises BenchFault if a client does not come up."""
        self._hear(START_S)

    def run(self, when: Round) -> list[Tally]:
        """Have all clients run a round. Raises BenchFault if one does not tell of it in time."""
        for line in self._lines:
            line.send(when)
        return self._hear(when.end - time.monotonic() + SLACK_S)

    def _new_line(self) -> Connection:
        ours, theirs = Pipe()
        self._lines.append(ours)
        return theirs

    def _hear(self, seconds: float) -> list[Any]:
        return [hear(line, f"client {index}", seconds) for index, line in enumerate(self._lines)]


def _below(parent: int, main: Callable[[], None]) -> None:
    """A child dies with its parent, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        main()


def _serve(line: Connection, open_client: Open, index: int) -> None:
    with line, open_client(index) as run:
        line.send("ready")
        for when in _orders(line):
            line.send(run(when))


def _orders(line: Connection) -> Iterator[Round]:
    try:
        while True:
            yield line.recv()
    except (EOFError, ConnectionError):
        return

"""The client processes of a contestant, as its host starts and orders them."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager

from shmsched.tools.bench.load import Rounds
from shmsched.tools.bench.plan import Plan, Round, Tally
from shmsched.tools.bench.processes import Role

START_S = 30.0
SLACK_S = 40.0
"""How much longer than its round a client may take: longer than one answer may."""

Open = Callable[[int], AbstractContextManager[Rounds]]
"""Connects as client number ``i`` and opens its sessions. Runs in the client's own process, or thread."""


class BenchFault(Exception):
    """A contestant does not do its job."""


class Crew:
    """Clients that wait for rounds. They end when their orders do."""

    def __init__(self, plan: Plan) -> None:
        self.processes: dict[str, list[int]] = {}
        """All that do a part of the job, by role."""
        self._plan = plan
        self._clients: list[_Client] = []

    def start(self, role: Role, main: Callable[[], None]) -> None:
        """Start a process that ends with this one."""
        self.knows(role, _fork(main))

    def knows(self, role: Role, pid: int) -> None:
        """This one does a part of the job too."""
        self.processes.setdefault(role, []).append(pid)

    def fork(self, open_client: Open) -> None:
        """Start each client as a process of its own."""
        for index in range(self._plan.clients):
            ours, theirs = socket.socketpair()

            def run(index: int = index, theirs: socket.socket = theirs) -> None:
                # Its copies would hide from the others that their orders have ended.
                for client in self._clients:
                    client.control.close()
                _serve(theirs, open_client, index)

            self.start(Role.CLIENT, run)
            theirs.close()
            self._clients.append(_Client(index, ours))

    def spawn_threads(self, open_client: Open) -> None:
        """Start each client as a thread."""
        for index in range(self._plan.clients):
            ours, theirs = socket.socketpair()
            threading.Thread(target=_serve, args=(theirs, open_client, index), daemon=True).start()
            self._clients.append(_Client(index, ours))

    def wait_ready(self) -> None:
        """Raises BenchFault if a client does not come up."""
        for client in self._clients:
            client.hear(START_S)

    def run(self, when: Round) -> list[Tally]:
        """Have all clients run a round. Raises BenchFault if one does not tell of it in time."""
        for client in self._clients:
            client.control.sendall(json.dumps({"start": when.start, "end": when.end}).encode() + b"\n")
        until = when.end + SLACK_S
        return [Tally(**json.loads(client.hear(until - time.monotonic()))) for client in self._clients]


class _Client:
    """The host's end of a client's orders."""

    def __init__(self, index: int, control: socket.socket) -> None:
        self.control = control
        self._index = index
        self._lines = control.makefile("r")

    def hear(self, seconds: float) -> str:
        self.control.settimeout(max(0.001, seconds))
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise BenchFault(f"client {self._index} said nothing for {seconds:.0f} s") from None
        if not line:
            raise BenchFault(f"client {self._index} ended; its traceback is above")
        return line


def _serve(control: socket.socket, open_client: Open, index: int) -> None:
    with control, control.makefile("rw") as lines, open_client(index) as run:
        print("ready", file=lines, flush=True)
        for line in lines:
            print(json.dumps(run(Round(**json.loads(line))).to_json()), file=lines, flush=True)


def _fork(main: Callable[[], None]) -> int:
    """Run ``main`` in a child that ends with this process, however this process ends. Returns its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _end_with(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()
    os._exit(1)

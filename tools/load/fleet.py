"""The client processes, as their parent sees them. Nothing in here waits for a client longer than it was told to."""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from shmsched.tools.load.ear import Ear
from shmsched.tools.load.flight import SELF
from shmsched.tools.load.options import ClientPlan
from shmsched.tools.load.shortages import next_child_in_pid_namespace
from shmsched.tools.load.tally import Tally

KILL_S = 5.0
TICK_S = 0.1


class Part(StrEnum):
    """What a client process does: the name of its module."""

    BUSY = "client"
    QUIET = "neighbour"
    INTERRUPTED = "interrupted"


@dataclass(slots=True, eq=False)
class ClientProcess:
    """One of them, and what it told last."""

    index: int
    process: subprocess.Popen[bytes]
    heard: float
    part: Part = Part.BUSY
    data: bytes = b""
    ready: bool = False
    at_end: bool = False
    """It says no more."""
    outstanding: int = 0
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    """What it has counted, as it told last."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """When nothing was answered, begin and end of each in seconds of ``time.monotonic()``."""
    final: bool = False
    """It has told its last counts."""
    waits: dict[str, Any] = field(default_factory=dict)
    """How long a quiet neighbour has waited, as it told last."""
    interrupts: dict[str, int] = field(default_factory=dict)
    """In which calls they came, as the client that is interrupted told last."""
    killed: bool = False
    """By us: what it had outstanding is nobody's any more."""
    error: str = ""

    @property
    def name(self) -> str:
        what = f"client {self.index}" if self.part is Part.BUSY else f"the {self.part} client"
        return f"{what} (pid {self.process.pid})"

    @property
    def may_be_hit(self) -> bool:
        """By faults that are aimed at one client."""
        return self.part is Part.BUSY

    def order(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            os.write(self.process.stdin.fileno(), line.encode() + b"\n")
        except BrokenPipeError:
            # It is dead; the end of its output tells how.
            pass

    def read(self) -> None:
        """Take what it has said. Called when there is something."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self.at_end = not data
        self.heard = time.monotonic()
        *lines, self.data = (self.data + data).split(b"\n")
        for line in lines:
            self._told(json.loads(line))

    def _told(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "ready":
                self.ready = True
            case "progress":
                self.outstanding = int(message["outstanding"])
                self._counted(message)
            case "final":
                self.final = True
                self.outstanding = 0
                self.seconds = float(message["seconds"])
                self._counted(message)
            case "error":
                self.error = str(message["message"])

    def _counted(self, message: dict[str, Any]) -> None:
        self.tally = Tally.from_json(message["tally"])
        self.waits = message.get("waits", {})
        self.interrupts = message.get("interrupts", {})
        for said in [said for said in self.tally.blamed if said.endswith(f" {SELF}")]:
            # In a PID namespace of its own it does not know its number.
            self.tally.blamed[said.replace(SELF, str(self.process.pid))] += self.tally.blamed.pop(said)
        self.pauses += [(float(begin), float(end)) for begin, end in message["pauses"]]

    def bury(self) -> None:
        """It was killed and says no more: keep nothing of it but what it told."""
        self.process.wait()
        self.close_pipes()

    def close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@dataclass(slots=True)
class Fleet:
    """Starts the clients, listens to them, and sees to it that they end."""

    ear: Ear
    in_namespaces: float = 0.0
    """The share of clients that have a PID namespace of their own."""
    apart: int = 0
    """How many have one by now."""
    clients: list[ClientProcess] = field(default_factory=list)
    selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)

    def start(self, plan: ClientPlan, part: Part = Part.BUSY) -> ClientProcess:
        n = len(self.clients)
        apart = math.floor((n + 1) * self.in_namespaces) > math.floor(n * self.in_namespaces)
        # A session of its own keeps a terminal's Ctrl-C away: the parent tells it when to stop.
        with self.ear.pipe(f"{part} {plan.index}") as stderr, next_child_in_pid_namespace() if apart else nullcontext():
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"shmsched.tools.load.{part}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        self.apart += apart
        client = ClientProcess(plan.index, process, time.monotonic(), part)
        self.clients.append(client)
        assert process.stdout is not None
        self.selector.register(process.stdout, selectors.EVENT_READ, client)
        client.order(json.dumps(asdict(plan)))
        return client

    @property
    def pids(self) -> set[int]:
        return {client.process.pid for client in self.clients}

    @property
    def living(self) -> list[ClientProcess]:
        return [client for client in self.clients if not (client.killed or client.at_end)]

    def order(self, line: str) -> None:
        for client in self.living:
            client.order(line)

    def listen_until(self, enough: Callable[[], bool], deadline: float, tick: Callable[[], None]) -> bool:
        """Listen until it is ``enough``, calling ``tick`` now and then. False if the deadline came first."""
        while not enough():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if not self.selector.get_map():
                time.sleep(min(left, TICK_S))
            for key, _ in self.selector.select(min(left, TICK_S)) if self.selector.get_map() else ():
                client: ClientProcess = key.data
                client.read()
                if client.at_end:
                    self.selector.unregister(key.fileobj)
                    if client.killed:
                        client.bury()
            tick()
        return True

    def end(self) -> None:
        """Kill those that still run, and reap all."""
        for client in self.clients:
            if client.process.poll() is None and client.at_end:
                # It has said its last and is on its way out.
                try:
                    client.process.wait(KILL_S)
                except subprocess.TimeoutExpired:
                    pass
            if client.process.poll() is None:
                client.process.send_signal(signal.SIGKILL)
            client.process.wait()
            client.close_pipes()
        self.selector.close()

    def problems(self, now: float) -> list[str]:
        """Which clients hung, died or failed, in words. After the deadline, before ``end``."""
        said = []
        for client in self.clients:
            if client.final or client.killed:
                continue
            if client.error:
                said.append(f"{client.name} gave up: {client.error}")
            elif client.at_end:
                said.append(f"{client.name} died: {_how(client.process)}")
            else:
                said.append(f"{client.name} hung: nothing heard for {now - client.heard:.1f} s; it was killed")
        return said


def _how(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        return "it closed its output and runs on; it was killed"
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"

"""The processes of a run, as their parent sees them. Nothing in here waits for one of them longer than it was told to."""

from __future__ import annotations

import math
import pickle
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

from shmsched.tools.load.options import Part, Plan
from shmsched.tools.load.part import Told
from shmsched.tools.load.said import Ear
from shmsched.tools.load.shortages import next_child_in_pid_namespace
from shmsched.tools.load.tally import SELF, Tally

KILL_S = 5.0
TICK_S = 0.1
MOST_TOLD = 1 << 20


@dataclass(slots=True, eq=False)
class Member:
    """One of them, and what it told last."""

    plan: Plan
    process: subprocess.Popen[bytes]
    socket: socket.socket
    heard: float = field(default_factory=time.monotonic)
    told: Told = field(default_factory=Told)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    ready: bool = False
    at_end: bool = False
    """It says no more."""
    killed: bool = False
    """By us: what it had outstanding is nobody's any more."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def tally(self) -> Tally:
        return self.told.tally

    @property
    def name(self) -> str:
        part = self.plan.part
        what = f"client {self.plan.index}" if part is Part.BUSY else f"the {part} client"
        return f"{what} (pid {self.pid})"

    def order(self, order: str) -> None:
        try:
            self.socket.send(order.encode())
        except OSError:
            # It is dead; the end of what it tells says how.
            pass

    def hear(self) -> None:
        """Take what it has said. Called when there is something."""
        try:
            data = self.socket.recv(MOST_TOLD)
        except ConnectionResetError:
            # It ended before it had read its orders; what it said before that is still there.
            data = self.socket.recv(MOST_TOLD)
        self.heard = time.monotonic()
        self.ready = True
        if not data:
            self.at_end = True
            return
        told: Told = pickle.loads(data)
        if told.error:
            # What it had counted by then stays.
            self.told.error = told.error
            return
        self.told = told
        self.pauses += self.told.pauses
        for said in [said for said in self.tally.blamed if said.endswith(f" {SELF}")]:
            # In a PID namespace of its own it does not know its number.
            self.tally.blamed[said.replace(SELF, str(self.pid))] += self.tally.blamed.pop(said)

    @property
    def problem(self) -> str | None:
        """That it hung, died or failed, in words. After the deadline, before it is ended."""
        if self.told.final or self.killed:
            return None
        if self.told.error:
            return f"{self.name} gave up: {self.told.error}"
        if not self.at_end:
            return f"{self.name} hung: nothing heard for {time.monotonic() - self.heard:.1f} s; it was killed"
        try:
            status = self.process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            return f"{self.name} died: it closed its output and runs on; it was killed"
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        return f"{self.name} died: {how}"


@dataclass(slots=True)
class Fleet:
    """Starts them, listens to them, and sees to it that they end."""

    ear: Ear
    in_namespaces: float = 0.0
    """The share that has a PID namespace of its own."""
    apart: int = 0
    """How many have one by now."""
    members: list[Member] = field(default_factory=list)
    selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)

    def start(self, plan: Plan) -> Member:
        n = len(self.members)
        apart = math.floor((n + 1) * self.in_namespaces) > math.floor(n * self.in_namespaces)
        # A message is read whole or not at all, though its writer be stopped or killed.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        namespace = next_child_in_pid_namespace() if apart else nullcontext()
        # A session of its own keeps a terminal's Ctrl-C away: the parent tells it when to stop.
        with theirs, self.ear.pipe(f"{plan.part} {plan.index}") as printing, namespace:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"shmsched.tools.load.{plan.part}", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=printing, stderr=printing, pass_fds=[theirs.fileno()],
                start_new_session=True,
            )  # fmt: skip
        self.apart += apart
        member = Member(plan, process, ours)
        self.members.append(member)
        self.selector.register(ours, selectors.EVENT_READ, member)
        ours.send(pickle.dumps(plan))
        return member

    @property
    def pids(self) -> set[int]:
        return {member.pid for member in self.members}

    @property
    def living(self) -> list[Member]:
        return [member for member in self.members if not (member.killed or member.at_end)]

    def one(self, part: Part) -> Member | None:
        return next((member for member in self.members if member.plan.part is part), None)

    def order(self, order: str) -> None:
        for member in self.living:
            member.order(order)

    def listen_until(self, enough: Callable[[], bool], deadline: float, tick: Callable[[], None]) -> None:
        """Listen until it is ``enough`` or the deadline, calling ``tick`` now and then."""
        while not enough() and (left := deadline - time.monotonic()) > 0:
            for key, _ in self.selector.select(min(left, TICK_S)):
                member: Member = key.data
                member.hear()
                if member.at_end:
                    self.selector.unregister(member.socket)
                    member.socket.close()
                    if member.killed:
                        member.process.wait()
            tick()

    def end(self) -> None:
        """Kill those that still run, and reap all."""
        for member in self.members:
            if member.at_end:
                # It has said its last and is on its way out.
                try:
                    member.process.wait(KILL_S)
                except subprocess.TimeoutExpired:
                    pass
            member.process.kill()
            member.process.wait()
            member.socket.close()
        self.selector.close()

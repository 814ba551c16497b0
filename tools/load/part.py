"""A process of a run, as it sees its parent: ``python -m shmsched.tools.load.<part> SOCKET``, the number of a descriptor."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shmsched import Client, Model, NoEngine, SchedulerUnreachable, SharedMemoryError, ShmschedError, SystemLimit
from shmsched.tools.load.options import MODEL, Plan
from shmsched.tools.load.tally import Tally

CONNECT_S = 10.0
SHORT_S = 60.0
"""For how long a shortage may keep a client from connecting, or the daemon from greeting it."""
ORPHAN_S = 10.0
PAUSE_S = 0.1
"""For how long nothing is answered where that is a pause."""
TELL_S = 0.2
RETRY_S = 0.005
RETRY_AFTER_FAILURE_S = 0.1


@dataclass(slots=True)
class Told:
    """What it tells its parent."""

    tally: Tally = field(default_factory=Tally)
    """What it has counted by now."""
    outstanding: int = 0
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """When nothing was answered, begin and end of each in seconds of ``time.monotonic()``: those that it has not told before."""
    seconds: float = 0.0
    """How long it has worked."""
    final: bool = False
    """It says no more."""
    error: str = ""
    """Why it gave up."""


class Counting(Protocol):
    """One of those who count something, while others look."""

    tally: Tally
    outstanding: int


class Parent:
    """Who gives it its plan, and is told what it counts."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=int(sys.argv[1]))
        self.plan: Plan = pickle.loads(self._socket.recv(1 << 16))
        self.over = threading.Event()
        """The parent wants no more, or is gone."""
        self.alarm = threading.Event()
        """Something was wrong, which is told at once: its finder may be killed in the next moment."""
        self.tally = Tally()
        """Of connections, and of what is over."""
        self.counting: Sequence[Counting] = ()
        """Who counts more."""
        self._lock = threading.Lock()
        self._go = threading.Event()
        self._done = threading.Event()
        self._telling = threading.Thread(target=self._tell_now_and_then, daemon=True)
        self._began = self._answered = 0.0
        self._pauses: deque[tuple[float, float]] = deque()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while order := self._socket.recv(16):
            if order == b"stop":
                self.over.set()
            self._go.set()
        self.over.set()
        self._go.set()
        # The work ends now; if it cannot, nobody is left who would end it.
        time.sleep(ORPHAN_S)
        os._exit(3)

    def ready(self) -> None:
        """Say so, and wait until all are."""
        self._socket.send(pickle.dumps(Told()))
        self._go.wait()
        self._began = time.monotonic()
        self._telling.start()

    @property
    def gives_up(self) -> bool:
        return self.over.is_set() or time.monotonic() >= self._began + self.plan.give_up_s

    def answered(self) -> None:
        """Something was. Called by any thread; one that gets lost does no harm."""
        now = time.monotonic()
        if self._answered and now - self._answered >= PAUSE_S:
            self._pauses.append((self._answered, now))
        self._answered = now

    def _tell_now_and_then(self) -> None:
        while not self._done.is_set():
            self.alarm.wait(TELL_S)
            self.alarm.clear()
            self._tell()

    def _tell(self, *, final: bool = False) -> None:
        tally = Tally()
        with self._lock:
            tally.merge(self.tally)
            for each in self.counting:
                tally.merge(each.tally)
            outstanding = sum(each.outstanding for each in self.counting)
        pauses = [self._pauses.popleft() for _ in range(len(self._pauses))]
        told = Told(tally, outstanding, pauses, time.monotonic() - self._began, final)
        self._socket.send(pickle.dumps(told))

    def absorb(self) -> None:
        """Those who count have ended: what they had counted is kept."""
        with self._lock:
            for each in self.counting:
                self.tally.merge(each.tally)
            self.counting = ()

    def done(self) -> None:
        self._done.set()
        self.alarm.set()
        self._telling.join()
        self._tell(final=True)

    def give_up(self, error: ShmschedError) -> None:
        self._socket.send(pickle.dumps(Told(error=f"{type(error).__name__}: {error}")))

    def connected(self, arena_bytes: int | None = None) -> Client:
        """A connection. Where things run short it is tried again, which counts as a step that failed of it."""
        deadline = time.monotonic() + SHORT_S
        while True:
            try:
                client = Client(socket=self.plan.socket, wait=CONNECT_S, arena_bytes=arena_bytes)
            except (SchedulerUnreachable, SharedMemoryError, SystemLimit) as e:
                if not self.plan.peers_fall or time.monotonic() >= deadline:
                    raise
                if not isinstance(e, SchedulerUnreachable):
                    self.tally.say_failed(e, 1, "a connection", peers_fall=True)
                time.sleep(RETRY_AFTER_FAILURE_S)
            else:
                self.tally.connects += 1
                return client


def served(client: Client, name: str = MODEL) -> Model:
    """The model, once it is served: while every engine is being started again nothing is, and a moment later nothing may be."""
    deadline = time.monotonic() + CONNECT_S
    while (model := client.models.get(name)) is None:
        if time.monotonic() >= deadline:
            raise NoEngine(f"no engine of model {name!r} came within {CONNECT_S:g} s")
        time.sleep(RETRY_S)
    return model


def run(work: Callable[[Parent], None]) -> int:
    """0: it told its final counts. 1: it told why it could not."""
    parent = Parent()
    try:
        work(parent)
        parent.done()
    except ShmschedError as e:
        parent.give_up(e)
        return 1
    return 0

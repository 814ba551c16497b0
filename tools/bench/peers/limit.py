"""The floor: what is left of the job when nothing is scheduled, checked or resolved.

The hand-overs are semaphore posts and waits: one for each step that a client submits, one to the engine and one back for
each batch, one to each client of a batch. The bytes are copied where ours are: a descriptor and a token into the client's
shared memory, from there into the engine's, a result back the same way, a row of logits straight to the client's.
All of it in lockstep: every batch has every session.
"""

from __future__ import annotations

import mmap
import time
from contextlib import ExitStack, nullcontext
from statistics import median

import numpy as np
import posix_ipc

from shmsched.tools.bench.crew import Crew, Rounds
from shmsched.tools.bench.load import ANSWER_S, Watch
from shmsched.tools.bench.plan import Plan, Round, Tally

STEP, RESULT = 64 + 4, 40
"""Bytes of a descriptor and its token, and of a record and its sampled token."""


class Client:
    """One client's shared memory, and the semaphore that it waits for."""

    def __init__(self, plan: Plan) -> None:
        n = plan.sessions
        self.answered = _semaphore()
        self.steps = memoryview(mmap.mmap(-1, n * STEP))
        self.results = memoryview(mmap.mmap(-1, n * RESULT))
        self.last = memoryview(mmap.mmap(-1, 2))
        """Whether this round trip is the last one: as the first client says, and as the scheduler tells everyone."""
        rows = n if plan.raw else 0
        memory = mmap.mmap(-1, max(1, rows * plan.vocab * 4))
        self.rows = np.frombuffer(memory, np.float32, rows * plan.vocab).reshape(rows, plan.vocab)


class Floor:
    """What the processes share."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.clients = [Client(plan) for _ in range(plan.clients)]
        self.submitted, self.work, self.done = _semaphore(), _semaphore(), _semaphore()
        self.steps = memoryview(mmap.mmap(-1, plan.clients * plan.sessions * STEP))
        self.results = memoryview(mmap.mmap(-1, plan.clients * plan.sessions * RESULT))

    def schedule(self) -> None:
        n, clients = self.plan.sessions, self.clients
        while True:
            for _ in range(n * len(clients)):
                self.submitted.acquire()
            for i, client in enumerate(clients):
                self.steps[i * n * STEP : (i + 1) * n * STEP] = client.steps
            self.work.release()
            self.done.acquire()
            last = clients[0].last[0]
            for i, client in enumerate(clients):
                client.results[:] = self.results[i * n * RESULT : (i + 1) * n * RESULT]
                client.last[1] = last
                client.answered.release()

    def run_engine(self) -> None:
        row = np.arange(self.plan.vocab, dtype=np.float32)
        while True:
            self.work.acquire()
            for at in range(len(self.steps) // STEP):
                self.results[at * RESULT : at * RESULT + 8] = self.steps[at * STEP : at * STEP + 8]
            for client in self.clients:
                for out in client.rows:
                    out[:] = row
            self.done.release()

    def client(self, index: int) -> Rounds:
        client, plan = self.clients[index], self.plan
        descriptor = bytearray(STEP)
        number = 0

        def run(when: Round) -> Tally:
            nonlocal number
            watch = Watch(when)
            times: list[float] = []
            wrong = last = 0
            while not last:
                client.last[0] = not watch.goes_on()
                if not watch.steps:
                    times.clear()
                sent = time.monotonic()
                number += 1
                descriptor[:8] = number.to_bytes(8, "little")
                for i in range(plan.sessions):
                    client.steps[i * STEP : (i + 1) * STEP] = descriptor
                    self.submitted.release()
                client.answered.acquire(ANSWER_S)
                for i in range(plan.sessions):
                    wrong += client.results[i * RESULT : i * RESULT + 8] != descriptor[:8]
                wrong += plan.raw and not np.all(client.rows[:, -1] == plan.vocab - 1)
                watch.steps += plan.sessions
                last = client.last[1]
                times.append(time.monotonic() - sent)
            watch.goes_on()
            return watch.tally(wrong, median(times) * 1e6)

        return run


def start(plan: Plan, crew: Crew, stack: ExitStack) -> None:
    floor = Floor(plan)
    crew.start("scheduler", floor.schedule)
    crew.start("engine", floor.run_engine)
    crew.fork(lambda index: nullcontext(floor.client(index)))


def _semaphore() -> posix_ipc.Semaphore:
    """Without a name: it is for processes that are forked from here."""
    semaphore = posix_ipc.Semaphore(None, posix_ipc.O_CREX)
    semaphore.unlink()
    return semaphore

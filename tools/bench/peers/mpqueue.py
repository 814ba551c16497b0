"""``multiprocessing.Queue`` and pickle, as the standard library gives them.

Its pickles come from processes that this one has forked. One queue brings the scheduler steps and finished batches.
"""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from shmsched import LogitsBlock, SamplingParams
from shmsched.tools.bench.crew import Crew
from shmsched.tools.bench.load import Rounds, rounds
from shmsched.tools.bench.peers.echoing import Echoing
from shmsched.tools.bench.peers.middle import Middle
from shmsched.tools.bench.peers.surface import Answer, Future, Session
from shmsched.tools.bench.plan import Plan
from shmsched.tools.bench.processes import Role

Step = tuple[int, int, int, int, Sequence[int], SamplingParams | None]
"""client, request, session, position, tokens, sampling"""


class Queues:
    """To the scheduler, to the engine, and to each client."""

    def __init__(self, plan: Plan) -> None:
        # Forked, and not spawned: then the semaphores in them have no name any more.
        context = multiprocessing.get_context("fork")
        self.inbox: Any = context.Queue()
        self.work: Any = context.Queue()
        self.answers: list[Any] = [context.Queue() for _ in range(plan.clients)]


def start(plan: Plan, crew: Crew, stack: ExitStack) -> None:
    queues = Queues(plan)
    crew.start(Role.SCHEDULER, lambda: _schedule(plan, queues))
    crew.start(Role.ENGINE, lambda: _engine(plan, queues))

    @contextmanager
    def open_client(index: int) -> Iterator[Rounds]:
        client = Client(index, queues)
        yield rounds([Session(client, number) for number in range(plan.sessions)], plan)

    crew.fork(open_client)


class Client:
    """Submits, and receives when a result is asked for."""

    def __init__(self, index: int, queues: Queues) -> None:
        self._index = index
        self._inbox = queues.inbox
        self._answers = queues.answers[index]
        self._futures: dict[int, Future] = {}
        self._next = 0

    def submit(self, session: int, position: int, tokens: Sequence[int], sampling: SamplingParams | None) -> Future:
        self._next = request = self._next + 1
        future = self._futures[request] = Future(self)
        self._inbox.put((self._index, request, session, position, tokens, sampling))
        return future

    def receive(self, timeout: float | None) -> None:
        try:
            answers = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no answer within {timeout} s") from None
        for request, tokens, row in answers:
            logits = None if row is None else LogitsBlock(row.reshape(1, -1))
            self._futures.pop(request).answer = Answer(tokens, logits)


def _schedule(plan: Plan, queues: Queues) -> None:
    inbox, work, answers = queues.inbox, queues.work, queues.answers
    middle: Middle[Step] = Middle(plan)
    while True:
        message = inbox.get()
        while True:
            if isinstance(message, list):
                told = middle.settle([tokens for tokens, _ in message])
                for client, mine in told.items():
                    answers[client].put([(step[1], *message[i]) for step, i in mine])
            else:
                client, request, session, _, tokens, _ = message
                middle.submit(client, request, session, tokens, message)
            if inbox.empty():
                break
            message = inbox.get()
        if middle.may_go:
            work.put(middle.take())


def _engine(plan: Plan, queues: Queues) -> None:
    echo = Echoing(plan)
    while True:
        steps: list[Step] = queues.work.get()
        tokens = echo.forward([(step[0], step[2]) for step in steps], [step[4] for step in steps])
        done: list[tuple[Sequence[int], Any]] = []
        for step, token in zip(steps, tokens, strict=True):
            if step[5] is not None:
                done.append(([token], None))
            else:
                row = np.empty(plan.vocab, np.float32)
                echo.fill(row, token)
                done.append(([], row))
        queues.inbox.put(done)

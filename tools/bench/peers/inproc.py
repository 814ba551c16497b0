"""Threads in one process, around one ``Scheduler``: clients submit to it themselves, an engine thread takes from it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager

import numpy as np

from shmsched import LogitsBlock, Request, RequestParams, Response, SamplingParams, Scheduler, SchedulerParams
from shmsched.tools.bench.crew import Crew
from shmsched.tools.bench.load import Rounds, rounds
from shmsched.tools.bench.peers.echoing import Echoing
from shmsched.tools.bench.plan import Plan


def start(plan: Plan, crew: Crew, stack: ExitStack) -> None:
    server = Server(plan)
    threading.Thread(target=server.run, daemon=True).start()

    @contextmanager
    def open_client(index: int) -> Iterator[Rounds]:
        yield rounds([Session(server, index * plan.sessions + number) for number in range(plan.sessions)], plan)

    crew.spawn_threads(open_client)


class Server:
    """The scheduler, and the engine's thread."""

    def __init__(self, plan: Plan) -> None:
        self.scheduler = Scheduler(SchedulerParams(max_decode_sequences=plan.batch), exclusive_sessions=True)
        self._plan = plan
        self._echo = Echoing(plan)
        self._asleep = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def submit(self, request: Request) -> Future[Response]:
        future = self.scheduler.submit(request)
        if self._asleep:
            self._asleep = False
            self._wake.put(None)
        return future

    def run(self) -> None:
        """The engine's thread."""
        scheduler, echo = self.scheduler, self._echo
        while True:
            batch = scheduler.get_work()
            if not batch:
                # Said before the last look: who submits after that look sees it.
                self._asleep = True
                if scheduler.has_work:
                    continue
                self._wake.get()
                continue
            steps = batch.requests
            tokens = echo.forward([step.session_id for step in steps], [step.tokens for step in steps])  # type: ignore[misc]
            for step, token in zip(steps, tokens, strict=True):
                if step.params.sampling is not None:
                    scheduler.complete(step.request_id, [token])
                else:
                    row = np.empty((1, self._plan.vocab), np.float32)
                    echo.fill(row[0], token)
                    scheduler.complete(step.request_id, LogitsBlock(row))


class Session:
    """What a thread holds of a session."""

    def __init__(self, server: Server, number: int) -> None:
        self._server = server
        self._number = number
        self._position = 0

    def submit(self, tokens: Sequence[int], *, sampling: SamplingParams | None) -> Future[Response]:
        server = self._server
        params = RequestParams(self._position, sampling)
        self._position += len(tokens)
        return server.submit(Request(server.scheduler.next_request_id(), self._number, tokens, params))

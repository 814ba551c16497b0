"""Threads in one process, around one ``Scheduler``: clients submit to it themselves, an engine thread takes from it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

from shmsched import Request, RequestParams, SamplingParams, Scheduler, SchedulerParams
from shmsched.tools.bench.crew import Crew, Rounds
from shmsched.tools.bench.load import rounds
from shmsched.tools.bench.peers.common import Echoing, Session
from shmsched.tools.bench.plan import Plan


def start(plan: Plan, crew: Crew, stack: ExitStack) -> None:
    server = Server(plan)
    threading.Thread(target=server.run, daemon=True).start()

    def open_client(index: int) -> nullcontext[Rounds]:
        first = index * plan.sessions
        return nullcontext(rounds([Session(server, first + number) for number in range(plan.sessions)], plan))

    crew.spawn_threads(open_client)


class Server:
    """The scheduler, and the engine's thread."""

    def __init__(self, plan: Plan) -> None:
        self._scheduler = Scheduler(SchedulerParams(max_decode_sequences=plan.batch), exclusive_sessions=True)
        self._echo = Echoing(plan)
        self._asleep = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def submit(self, session: int, position: int, tokens: Sequence[int], sampling: SamplingParams | None) -> Any:
        request = Request(self._scheduler.next_request_id(), session, tokens, RequestParams(position, sampling))
        future = self._scheduler.submit(request)
        if self._asleep:
            self._asleep = False
            self._wake.put(None)
        return future

    def run(self) -> None:
        """The engine's thread."""
        scheduler, echo = self._scheduler, self._echo
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
                scheduler.complete(step.request_id, [token])

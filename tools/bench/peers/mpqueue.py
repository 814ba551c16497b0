"""``multiprocessing.Queue`` and pickle, as the standard library gives them; tokens only.

Its pickles come from processes that this one has forked. One queue brings the scheduler steps and finished batches.
"""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

from shmsched import SamplingParams
from shmsched.tools.bench.crew import Crew, Rounds
from shmsched.tools.bench.load import rounds
from shmsched.tools.bench.peers import common
from shmsched.tools.bench.plan import Plan


def start(plan: Plan, crew: Crew, stack: ExitStack) -> None:
    # Forked, and not spawned: then the semaphores in them have no name any more.
    context = multiprocessing.get_context("fork")
    inbox: Any = context.Queue()
    work: Any = context.Queue()
    answers: list[Any] = [context.Queue() for _ in range(plan.clients)]
    crew.start("scheduler", lambda: _schedule(plan, inbox, work, answers))
    crew.start("engine", lambda: _engine(plan, inbox, work))

    def open_client(index: int) -> nullcontext[Rounds]:
        client = Client(index, inbox, answers[index])
        return nullcontext(rounds([common.Session(client, number) for number in range(plan.sessions)], plan))

    crew.fork(open_client)


class Client(common.Client):
    """Submits, and receives when a result is asked for."""

    def __init__(self, index: int, inbox: Any, answers: Any) -> None:
        super().__init__()
        self._index, self._inbox, self._answers = index, inbox, answers

    def submit(self, session: int, position: int, tokens: Sequence[int], sampling: SamplingParams | None) -> Any:
        request, future = self.expect()
        self._inbox.put((self._index, request, session, position, tokens, sampling))
        return future

    def receive(self, timeout: float | None) -> None:
        try:
            answers = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no answer within {timeout} s") from None
        for request, tokens in answers:
            self.futures.pop(request).set_result(common.Answer(tokens))


def _schedule(plan: Plan, inbox: Any, work: Any, answers: list[Any]) -> None:
    middle = common.Middle(plan)
    while True:
        message = inbox.get()
        while True:
            if isinstance(message, list):
                for client, mine in middle.settle(message).items():
                    answers[client].put([(step[1], message[i]) for step, i in mine])
            else:
                client, request, session, _, tokens, _ = message
                middle.submit(client, request, session, tokens, message)
            if inbox.empty():
                break
            message = inbox.get()
        if middle.may_go:
            work.put(middle.take())


def _engine(plan: Plan, inbox: Any, work: Any) -> None:
    echo = common.Echoing(plan)
    while True:
        steps = work.get()
        tokens = echo.forward([(client, session) for client, _, session, *_ in steps], [step[4] for step in steps])
        inbox.put([[token] for token in tokens])

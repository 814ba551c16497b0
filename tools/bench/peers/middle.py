"""The scheduler process of the peers: the in-process ``Scheduler``, and whose step is whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from shmsched import Request, Scheduler, SchedulerParams
from shmsched.tools.bench.plan import Plan

S = TypeVar("S")

_PER_CLIENT = 1 << 40


class Middle(Generic[S]):
    """Steps of type ``S`` in, batches of them out, one batch at a time. Clients' own numbers stay unique by their client."""

    def __init__(self, plan: Plan) -> None:
        self._scheduler = Scheduler(SchedulerParams(max_decode_sequences=plan.batch), exclusive_sessions=True)
        self._steps: dict[int, S] = {}
        self._batch: list[int] = []

    @property
    def may_go(self) -> bool:
        """The engine is free, and a step is queued."""
        return not self._batch and self._scheduler.has_work

    def submit(self, client: int, request: int, session: int, tokens: Sequence[int], step: S) -> None:
        number = client * _PER_CLIENT + request
        self._steps[number] = step
        self._scheduler.submit(Request(number, client * _PER_CLIENT + session, tokens))

    def take(self) -> list[S]:
        """The next batch; the engine has it now."""
        self._batch = [request.request_id for request in self._scheduler.get_work().requests]
        return [self._steps[number] for number in self._batch]

    def settle(self, answers: Sequence[Sequence[int]]) -> dict[int, list[tuple[S, int]]]:
        """The batch is done. For each client its steps, and their indices in the batch."""
        mine: dict[int, list[tuple[S, int]]] = {}
        for index, (number, tokens) in enumerate(zip(self._batch, answers, strict=True)):
            self._scheduler.complete(number, tokens)
            step = self._steps.pop(number)
            mine.setdefault(number // _PER_CLIENT, []).append((step, index))
        self._batch = []
        return mine

"""Scenario ``core``: the in-process ``Scheduler`` by itself, in one thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from shmsched import Request, Response, Scheduler, SchedulerParams
from shmsched.tools.bench.measure import Bar, Effort, Finding, alternate, figures, ratio

OURS, BARE = "Scheduler", "deque and Future"
SESSIONS = BATCH = 32
ANSWER = [5]


def run(effort: Effort) -> Finding:
    """Submit, get_work, complete and result, in CPU time, which no other process takes from it."""
    runs: dict[str, Callable[[], float]] = {
        OURS: lambda: 1 / step_s(effort.seconds),
        BARE: lambda: 1 / bare_step_s(effort.seconds),
    }
    values = alternate(runs, effort)
    return Finding([*figures(values, "steps/s"), ratio(values, OURS, BARE, Bar(1.5))])


def step_s(seconds: float, queued: int = 0) -> float:
    """Of one step: submit, its share of get_work, complete, result. Decodes in closed loop, one thread.

    ``queued``: so many more steps, each of a session of its own, stand in the queue all the time. The requests are made
    beforehand: that is the caller's part, about 0.15 us each.
    """
    scheduler = Scheduler(SchedulerParams(max_decode_sequences=BATCH))
    requests = _requests(SESSIONS + queued)
    futures = {request.request_id: scheduler.submit(request) for request in requests}
    return _each_s(partial(_run_batch, scheduler, futures), seconds, len(requests))


def bare_step_s(seconds: float) -> float:
    """The same hand-overs, of steps and of answers, with nothing in between."""
    futures: dict[int, Future[list[int]]] = {number: Future() for number in range(SESSIONS)}
    return _each_s(partial(_run_bare_batch, deque(_requests(SESSIONS)), futures), seconds, SESSIONS)


def _requests(n: int) -> list[Request]:
    return [Request(number, number, [7]) for number in range(n)]


def _each_s(run_batch: Callable[[], None], seconds: float, n_requests: int) -> float:
    for _ in range(-(-n_requests // BATCH)):  # once around, so that memory lies as it does in a long run
        run_batch()
    batches = 0
    start = time.thread_time()
    while (now := time.thread_time()) < start + seconds:
        for _ in range(20):
            run_batch()
        batches += 20
    return (now - start) / (batches * BATCH)


def _run_batch(scheduler: Scheduler, futures: dict[int, Future[Response]]) -> None:
    requests = scheduler.get_work().requests
    for request in requests:
        scheduler.complete(request.request_id, ANSWER)
    for request in requests:
        futures[request.request_id].result()
    for request in requests:
        futures[request.request_id] = scheduler.submit(request)


def _run_bare_batch(queue: deque[Request], futures: dict[int, Future[Any]]) -> None:
    requests = [queue.popleft() for _ in range(BATCH)]
    for request in requests:
        futures[request.request_id].set_result(ANSWER)
    for request in requests:
        futures[request.request_id].result()
    for request in requests:
        futures[request.request_id] = Future()
        queue.append(request)

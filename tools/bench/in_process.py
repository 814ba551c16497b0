"""What a step costs in the in-process ``Scheduler``, with its future and without it."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass

from shmsched import Request, Response, Scheduler, SchedulerParams
from shmsched.scheduling.scheduler import StepFuture

ANSWER = [5]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of one step: submit, its share of get_work, complete, result. In CPU time, which no other process takes from it."""

    step: float
    """Seconds, all of it."""
    future: float
    """Seconds for a future such as the step's: made, settled and read, measured in turn with the steps."""

    @property
    def steps_per_s(self) -> float:
        return 1 / self.step

    @property
    def steps_per_s_without_futures(self) -> float:
        return 1 / (self.step - self.future)


def cost_of_a_step(seconds: float, sessions: int = 32, batch: int = 32, queued: int = 0) -> StepCost:
    """Decodes in closed loop, one thread, for about ``seconds`` of CPU time. Each session submits again when it is answered.

    ``queued``: so many more steps, each of a session of its own, stand in the queue all the time. The requests are made
    beforehand: that is the caller's part, about 0.15 us each.
    """
    scheduler = Scheduler(SchedulerParams(max_decode_sequences=batch))
    requests = [Request(number, number, [7]) for number in range(sessions + queued)]
    futures = {request.request_id: scheduler.submit(request) for request in requests}
    for _ in range(-(-len(requests) // batch)):  # once around, so that memory lies as it does in a long run
        _run_batch(scheduler, futures)
    in_steps = in_futures = 0.0
    steps = made = 0
    end = time.thread_time() + seconds
    while (start := time.thread_time()) < end:
        for _ in range(20):
            steps += _run_batch(scheduler, futures)
        half = time.thread_time()
        for _ in range(20):
            made += _run_futures(batch)
        in_steps += half - start
        in_futures += time.thread_time() - half
    return StepCost(in_steps / steps, in_futures / made)


def _run_batch(scheduler: Scheduler, futures: dict[int, Future[Response]]) -> int:
    requests = scheduler.get_work().requests
    for request in requests:
        scheduler.complete(request.request_id, ANSWER)
    for request in requests:
        futures[request.request_id].result()
    for request in requests:
        futures[request.request_id] = scheduler.submit(request)
    return len(requests)


def _run_futures(n: int) -> int:
    response = Response(0, 0)
    futures = [StepFuture() for _ in range(n)]
    for future in futures:
        future.set_result(response)
    for future in futures:
        future.result()
    return n

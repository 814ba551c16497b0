"""The scheduler against a plain model of the rules: one list of queued steps, one list of turns, and scans."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, wait

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shmsched.errors import InvalidRequest, StepFailed
from shmsched.scheduling import Scheduler, SchedulerParams
from shmsched.steps import Request, Response

IDS = st.integers(1, 14)
PICKS = st.integers(0, 5)
SESSIONS = st.integers(1, 4)
SIZES = st.one_of(st.just(1), st.integers(0, 7))


class Model:
    """What the rules say, as plainly as possible."""

    def __init__(self, params: SchedulerParams, exclusive: bool) -> None:
        self.params, self.exclusive = params, exclusive
        self.line: list[Request] = []  # all queued steps, in order
        self.turns: list[int] = []
        self.last_chunk: dict[int, Request] = {}
        self.vacated: set[int] = set()
        self.in_flight: dict[int, Request] = {}
        self.counts: Counter[str] = Counter()

    def outstanding(self, request_id: int) -> bool:
        return request_id in self.in_flight or any(r.request_id == request_id for r in self.line)

    def acceptable(self, request: Request) -> bool:
        size_fits = 1 <= len(request.tokens) <= self.params.max_prefill_chunk_size
        return size_fits and not self.outstanding(request.request_id)

    def chunks(self, session: int) -> list[Request]:
        return [r for r in self.line if r.session_id == session and len(r.tokens) > 1]

    def enter(self, request: Request, front: bool = False) -> None:
        session = request.session_id
        if len(request.tokens) > 1:
            if not front or not self.chunks(session):
                self.last_chunk[session] = request
                self.vacated.discard(session)
            if session not in self.turns:
                self.turns.append(session)
        self.line.insert(0 if front else len(self.line), request)

    def remove(self, request: Request) -> None:
        self.line.remove(request)
        session = request.session_id
        if len(request.tokens) > 1 and (request is self.last_chunk.get(session) or not self.chunks(session)):
            self.vacated.add(session)

    def end_turn(self, session: int) -> None:
        if session in self.turns:
            self.turns.remove(session)

    def get_work(self) -> list[Request]:
        decodes: list[Request] = []
        seen: set[int] = set()
        for r in self.line:
            may_go = not self.exclusive or r.session_id not in seen
            seen.add(r.session_id)
            if len(r.tokens) == 1 and may_go and len(decodes) < self.params.max_decode_sequences:
                decodes.append(r)
        for r in decodes:
            self.line.remove(r)
        gave_a_decode = {r.session_id for r in decodes} if self.exclusive else set()
        room = self.params.max_batch_size - len(decodes)
        chunks: list[Request] = []
        progress = True
        while progress and room > 0:
            progress = False
            for session in list(self.turns):
                if room == 0:
                    break  # whoever comes later in this pass keeps its turn, vacant or not
                if not self.chunks(session):
                    self.end_turn(session)
                    continue
                first = next(r for r in self.line if r.session_id == session and (self.exclusive or len(r.tokens) > 1))
                if session in gave_a_decode or len(first.tokens) == 1 or len(first.tokens) > room:
                    continue
                self.line.remove(first)
                chunks.append(first)
                room -= len(first.tokens)
                progress = True
                self.turns.remove(session)
                if self.chunks(session) or session in self.vacated:
                    self.turns.append(session)
        batch = decodes + chunks
        self.in_flight.update({r.request_id: r for r in batch})
        return batch


class SchedulerMachine(RuleBasedStateMachine):
    exclusive = False

    @initialize(d=st.integers(1, 4), c=st.integers(1, 6))
    def start(self, d: int, c: int) -> None:
        params = SchedulerParams(d, c)
        self.scheduler = Scheduler(params, exclusive_sessions=self.exclusive)
        self.model = Model(params, self.exclusive)
        self.futures: dict[int, Future[Response]] = {}

    def expect_settled(self, request: Request, outcome: str) -> None:
        future = self.futures.pop(request.request_id)
        assert wait([future], timeout=0).done == {future}
        if outcome == "completed":
            response = future.result(timeout=0)
            assert (response.request_id, response.session_id) == (request.request_id, request.session_id)
            assert response.tokens.tolist() == [request.request_id]
        elif outcome == "cancelled":
            assert future.cancelled()
        else:
            assert isinstance(future.exception(timeout=0), StepFailed)
        self.model.counts[outcome] += 1

    @rule(request_id=IDS, session=SESSIONS, n=SIZES)
    def submit(self, request_id: int, session: int, n: int) -> None:
        request = Request(request_id, session, range(n))
        future = self.scheduler.submit(request)
        if self.model.acceptable(request):
            self.model.enter(request)
            self.model.counts["submitted"] += 1
            self.futures[request_id] = future
        else:
            assert isinstance(future.exception(timeout=0), InvalidRequest)

    @rule(ids=st.lists(IDS, max_size=4), session=SESSIONS, sizes=st.lists(SIZES, min_size=4, max_size=4))
    def submit_many(self, ids: list[int], session: int, sizes: list[int]) -> None:
        requests = [Request(i, session, range(n)) for i, n in zip(ids, sizes, strict=False)]
        futures = self.scheduler.submit_many(requests)
        assert len(futures) == len(requests)
        if len(set(ids)) == len(ids) and all(self.model.acceptable(r) for r in requests):
            for request, future in zip(requests, futures, strict=True):
                self.model.enter(request)
                self.model.counts["submitted"] += 1
                self.futures[request.request_id] = future
        else:
            assert all(isinstance(f.exception(timeout=0), InvalidRequest) for f in futures)

    @rule()
    def get_work(self) -> None:
        batch = self.scheduler.get_work()
        expected = self.model.get_work()
        assert [r.request_id for r in batch.requests] == [r.request_id for r in expected]
        assert all(got is put for got, put in zip(batch.requests, expected, strict=True))
        assert batch.n_tokens == sum(len(r.tokens) for r in expected)
        assert bool(batch) == bool(expected)

    @rule(request_id=IDS)
    def complete(self, request_id: int) -> None:
        request = self.model.in_flight.pop(request_id, None)
        assert self.scheduler.complete(request_id, [request_id]) == (request is not None)
        if request is None:
            self.model.counts["ignored"] += 1
        else:
            self.expect_settled(request, "completed")

    @rule(request_id=IDS)
    def fail(self, request_id: int) -> None:
        request = self.model.in_flight.pop(request_id, None)
        for queued in [r for r in self.model.line if r.request_id == request_id]:
            request = queued
            self.model.remove(queued)
        assert self.scheduler.fail(request_id, "why") == (request is not None)
        if request is None:
            self.model.counts["ignored"] += 1
        else:
            self.expect_settled(request, "failed")

    @rule()
    def fail_all(self) -> None:
        model = self.model
        requests = [*model.line, *model.in_flight.values()]
        assert self.scheduler.fail_all("why") == len(requests)
        model.line, model.in_flight, model.turns = [], {}, []
        for request in requests:
            self.expect_settled(request, "failed")

    @precondition(lambda self: self.futures)
    @rule(pick=PICKS)
    def cancel(self, pick: int) -> None:
        request_id = [*self.futures][pick % len(self.futures)]
        queued = [r for r in self.model.line if r.request_id == request_id]
        assert self.futures[request_id].cancel() == bool(queued)
        for request in queued:
            self.model.remove(request)
            self.expect_settled(request, "cancelled")

    @rule(session=SESSIONS)
    def cancel_session(self, session: int) -> None:
        dropped = [r for r in self.model.line if r.session_id == session]
        assert self.scheduler.cancel_session(session) == dropped
        self.model.line = [r for r in self.model.line if r.session_id != session]
        self.model.end_turn(session)
        for request in dropped:
            self.expect_settled(request, "cancelled")

    @rule()
    def clear(self) -> None:
        assert self.scheduler.clear() == self.model.line
        dropped, self.model.line, self.model.turns = self.model.line, [], []
        for request in dropped:
            self.expect_settled(request, "cancelled")

    @rule(pick=PICKS)
    def requeue(self, pick: int) -> None:
        request_id = [*self.model.in_flight, 99][pick % (1 + len(self.model.in_flight))]
        request = self.model.in_flight.pop(request_id, None)
        assert self.scheduler.requeue(request_id) == (request is not None)
        if request is not None:
            self.model.enter(request, front=True)

    @invariant()
    def counters_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        model, scheduler = self.model, self.scheduler
        assert scheduler.queued == len(model.line)
        assert scheduler.has_work == bool(model.line)
        assert [i for i in range(1, 15) if scheduler.pending(i)] == [i for i in range(1, 15) if model.outstanding(i)]
        counts = scheduler.counts
        assert counts.balanced
        assert counts.in_flight == len(model.in_flight)
        for name in ("submitted", "completed", "failed", "cancelled", "ignored"):
            assert getattr(counts, name) == model.counts[name], name
        for request_id, future in self.futures.items():
            assert not future.done()
            assert future.running() == (request_id in model.in_flight)


class ExclusiveMachine(SchedulerMachine):
    exclusive = True


@pytest.mark.parametrize("machine", [SchedulerMachine, ExclusiveMachine])
def test_scheduler_against_the_model(machine: type[SchedulerMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=500, stateful_step_count=40, deadline=None))

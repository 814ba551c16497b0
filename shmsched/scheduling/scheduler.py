"""The scheduler for use in process: thread-safe, with futures."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from shmsched.arguments import shown
from shmsched.dataplane.ledger import Ledger, LedgerCounts
from shmsched.dataplane.queues import StepQueues
from shmsched.dataplane.step import QueuedStep, StepState
from shmsched.errors import InvalidRequest, StepFailed
from shmsched.futures import LightFuture
from shmsched.scheduling.batch import Batch
from shmsched.scheduling.params import SchedulerParams
from shmsched.steps import LogitsBlock, Request, Response, Tokens

INT64_MAX = 2**63 - 1
_DEFAULTS = SchedulerParams()
_INT64 = np.dtype(np.int64)
_NO_TOKENS = np.empty(0, np.int64)
_NO_TOKENS.flags.writeable = False  # all raw responses share it


class StepFuture(LightFuture[Response]):
    """The future of one step. ``cancel()`` takes a queued step out of its queue; one in flight cannot be cancelled."""

    _step: _Step | None = None
    """None if rejected, and once settled: whoever keeps a future must not keep the tokens of its step with it."""

    def cancel(self) -> bool:
        step = self._step
        if step is not None and step.scheduler._take_out(step):
            _cancel([step])
        return self.cancelled()

    def running(self) -> bool:
        step = self._step
        return step is not None and step.state is StepState.IN_FLIGHT

    def _set_cancelled(self) -> None:
        self._step = None
        super().cancel()
        # concurrent.futures.wait() does not return a future that is cancelled until this says so to those who wait.
        self.set_running_or_notify_cancel()


class _Step(QueuedStep):
    __slots__ = ("future", "request", "scheduler")

    def __init__(self, scheduler: Scheduler, request: Request, n_tokens: int) -> None:
        self.number = request.request_id
        self.session = request.session_id
        self.n_tokens = n_tokens
        self.scheduler = scheduler
        self.request = request
        self.future = StepFuture()
        self.future._step = self


class Scheduler:
    """Forms batches from the steps of many sessions: decodes first, prefill in rotation.

    Of a request it reads ``request_id``, ``session_id`` and ``len(tokens)``; the rest is carried to the batch unread.
    ``exclusive_sessions``: a batch holds, of one session, one decode or consecutive chunks, in order of submission.

    Every method may be called from any thread. Callbacks of futures run in the thread that settles, outside the lock.
    """

    def __init__(self, params: SchedulerParams = _DEFAULTS, exclusive_sessions: bool = False) -> None:
        if not isinstance(params, SchedulerParams):
            raise InvalidRequest(f"params is {shown(params)}; a SchedulerParams is wanted")
        self._params = params
        self._lock = threading.Lock()
        # What is below changes only under the lock. No future is resolved under it: its callbacks may call in here.
        self._queues = StepQueues(params.max_decode_sequences, params.max_batch_size, exclusive_sessions)
        self._ledger = Ledger()
        self._open: dict[int, _Step] = {}  # queued or in flight, by request_id
        self._next_request_id = 1

    @property
    def params(self) -> SchedulerParams:
        """The limits."""
        return self._params

    @property
    def queued(self) -> int:
        """How many steps wait; those in flight do not count."""
        return self._ledger.queued

    @property
    def has_work(self) -> bool:
        """Whether any step waits."""
        return self._ledger.queued > 0

    @property
    def counts(self) -> LedgerCounts:
        """Where all steps stand, at one moment."""
        with self._lock:
            return self._ledger.counts()

    def pending(self, request_id: int) -> bool:
        """Whether this step is queued or in flight."""
        return request_id in self._open

    def next_request_id(self) -> int:
        """A request_id that nobody else gets, and that no outstanding step has."""
        with self._lock:
            while self._next_request_id in self._open:
                self._next_request_id += 1
            self._next_request_id += 1
            return self._next_request_id - 1

    def submit(self, request: Request) -> Future[Response]:
        """Queue a step. A request that cannot run as it stands gives a future that has failed with InvalidRequest."""
        try:
            step = self._read(request)
            with self._lock:
                if step.number in self._open:
                    raise InvalidRequest(_outstanding(step))
                self._queues.push(step)
                self._ledger.enter(step)
                self._open[step.number] = step
        except InvalidRequest as error:
            return _rejected(str(error))
        return step.future

    def submit_many(self, requests: Iterable[Request]) -> list[Future[Response]]:
        """Queue steps one behind the other, all or none: if one cannot run, every future has failed and names it."""
        requests = list(requests)
        try:
            steps = [self._read(request) for request in requests]
            with self._lock:
                ids: set[int] = set()
                for step in steps:
                    if step.number in self._open or step.number in ids:
                        raise InvalidRequest(_outstanding(step))
                    ids.add(step.number)
                    hash(step.session)  # if it has none, this raises here, where nothing is queued yet
                for step in steps:
                    self._enter(step)
        except InvalidRequest as error:
            return [_rejected(f"none of {len(requests)} requests was queued: {error}") for _ in requests]
        return [step.future for step in steps]

    def get_work(self) -> Batch:
        """The next batch, empty if nothing is queued. Its steps are in flight until completed, failed or requeued."""
        with self._lock:
            batch, steps = self._queues.hand_over(_batch_of)
            self._ledger.dispatch(steps)
        return batch

    def complete(self, request_id: int, answer: Tokens | LogitsBlock) -> bool:
        """Settle a step in flight, with its tokens (one for each output row) or its logits.

        False if it is not in flight. TypeError if the answer is neither; the step stays in flight then.
        """
        if isinstance(answer, LogitsBlock):
            tokens, logits = _NO_TOKENS, answer
        else:
            tokens, logits = _as_tokens(request_id, answer), None
        with self._lock:
            step = self._open.get(request_id)
            if step is None:
                self._ledger.ignore()
                return False
            if not self._ledger.complete(step):
                return False
            del self._open[request_id]
        future = step.future
        future._step = None
        future.set_result(Response(request_id, step.request.session_id, tokens, None, logits))
        return True

    def fail(self, request_id: int, why: str) -> bool:
        """Settle a step, queued or in flight, with StepFailed, which says why. False if it is not outstanding."""
        with self._lock:
            step = self._find(request_id)
            if step is None:
                return False
            self._queues.remove(step)
            self._ledger.fail(step)
            del self._open[request_id]
        _fail(step, why)
        return True

    def fail_all(self, why: str) -> int:
        """Settle every step, queued or in flight, with StepFailed. Returns how many. The scheduler goes on."""
        with self._lock:
            steps = list(self._open.values())
            self._queues.clear()
            self._open.clear()
            for step in steps:
                self._ledger.fail(step)
        for step in steps:
            _fail(step, why)
        return len(steps)

    def requeue(self, request_id: int) -> bool:
        """Put a step in flight back before all others of its session, a decode before all. False if not in flight."""
        with self._lock:
            step = self._open.get(request_id)
            if step is None or not self._ledger.requeue(step):
                return False
            self._queues.push_front(step)
            return True

    def cancel_session(self, session_id: int) -> list[Request]:
        """Drop the queued steps of a session, cancel their futures, and return them in order of submission."""
        with self._lock:
            steps = self._drop(self._queues.drop_session(session_id))
        return _cancel(steps)

    def clear(self) -> list[Request]:
        """Drop all queued steps, cancel their futures, and return them as they arrived. What is in flight goes on."""
        with self._lock:
            steps = self._drop(self._queues.clear())
        return _cancel(steps)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Scheduler cannot be copied or pickled: its futures and its lock live here; share this one instead"
        )

    def _read(self, request: Request) -> _Step:
        """All that is ever read of a request. A size is only compared here; it takes part in sums once it is small."""
        limit = self._params.max_prefill_chunk_size
        try:
            n_tokens = len(request.tokens)
        except OverflowError:
            raise InvalidRequest(
                f"request {request.request_id}: more than {sys.maxsize} tokens, over max_prefill_chunk_size={limit}"
            ) from None
        except AttributeError:
            raise InvalidRequest(f"request is {shown(request)}; a Request is wanted") from None
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"request {request.request_id}: its tokens have no length: {error}") from None
        if not 0 < n_tokens <= limit:
            raise InvalidRequest(
                f"request {request.request_id}: {n_tokens} tokens; a step has from 1 to max_prefill_chunk_size={limit}"
            )
        return _Step(self, request, n_tokens)

    def _enter(self, step: _Step) -> None:
        self._queues.push(step)
        self._ledger.enter(step)
        self._open[step.number] = step

    def _find(self, request_id: int) -> _Step | None:
        step = self._open.get(request_id)
        if step is None:
            self._ledger.ignore()
        return step

    def _drop(self, steps: list[_Step]) -> list[_Step]:
        for step in steps:
            self._ledger.cancel(step)
            del self._open[step.number]
        return steps

    def _take_out(self, step: _Step) -> bool:
        """A future asks for its step to be cancelled. False unless it is queued."""
        with self._lock:
            if not self._queues.remove(step):
                return False
            self._drop([step])
            return True


def _batch_of(steps: list[_Step]) -> tuple[Batch, list[_Step]]:
    return Batch(tuple([step.request for step in steps]), sum([step.n_tokens for step in steps])), steps


def _as_tokens(request_id: int, answer: Any) -> npt.NDArray[np.int64]:
    """A copy, so that an engine may use its own array again."""
    try:
        array = np.array(answer)
        if array.dtype is _INT64 and array.ndim == 1:
            return array
        whole = array.dtype.kind == "i" or (array.dtype.kind == "u" and array.max(initial=0) <= INT64_MAX)
        if array.ndim == 1 and (whole or array.size == 0):
            return array.astype(np.int64, copy=False)
        what = f"{type(answer).__name__}, {array.dtype} of shape {array.shape}"
    except ValueError:
        what = f"{type(answer).__name__} of uneven rows"
    raise TypeError(
        f"request {request_id} cannot be completed with {what}: it takes a sequence of ints, one for each output row, "
        "or a LogitsBlock. It is still in flight; to give up on it, use fail()."
    )


def _outstanding(step: _Step) -> str:
    return f"request {step.number}: a request with this id is outstanding already; an id is free again once settled"


def _rejected(message: str) -> StepFuture:
    future = StepFuture()
    future.set_exception(InvalidRequest(message))
    return future


def _fail(step: _Step, why: str) -> None:
    step.future._step = None
    step.future.set_exception(StepFailed(f"request {step.number} of session {step.session} failed: {why}"))


def _cancel(steps: list[_Step]) -> list[Request]:
    for step in steps:
        step.future._set_cancelled()
    return [step.request for step in steps]

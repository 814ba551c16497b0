"""What the peers have in common: their clients' surface, the scheduler in the middle, and an engine over plain lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shmsched import LogitsBlock, Request, SamplingParams, Scheduler, SchedulerParams
from shmsched.tools.bench.plan import Plan
from shmsched.workers.echo import MASK, MULTIPLIER, PEAK

_PER_CLIENT = 1 << 40


class Answer(NamedTuple):
    """What a step gave: tokens, or logits."""

    tokens: Sequence[int]
    logits: LogitsBlock | None = None
    logprobs: None = None


class Client:
    """A client's end of a transport. It has ``submit``, which gives the future of a step's answer, and ``receive``, which waits for
    a message and settles the futures that it answers, or raises TimeoutError.

    Made to cost as little as can be: one thread uses it, so there is no lock; and nobody receives in the background, unless it is
    to make futures that promise that.
    """

    def __init__(self, make_future: Callable[[], Any] | None = None) -> None:
        self.futures: dict[int, Any] = {}
        self._make_future = make_future or partial(Future, self)
        self._next = 0

    def expect(self) -> tuple[int, Any]:
        """A new request, and the future of its answer."""
        self._next = request = self._next + 1
        future = self.futures[request] = self._make_future()
        return request, future


class Future:
    """The answer to come of one step. Who asks for it receives until it is there."""

    __slots__ = ("_answer", "_client")

    def __init__(self, client: Any) -> None:
        self._client = client
        self._answer: Answer | None = None

    def set_result(self, answer: Answer) -> None:
        self._answer = answer

    def result(self, timeout: float | None = None) -> Answer:
        while self._answer is None:
            self._client.receive(timeout)
        return self._answer


class Session:
    """A session of a peer's client. It keeps its position, as ours does."""

    __slots__ = ("_client", "_number", "_position")

    def __init__(self, client: Any, number: int) -> None:
        self._client, self._number, self._position = client, number, 0

    def submit(self, tokens: Sequence[int], *, sampling: SamplingParams | None) -> Any:
        future = self._client.submit(self._number, self._position, tokens, sampling)
        self._position += len(tokens)
        return future


class Middle:
    """The scheduler process: steps in, batches of them out, one at a time. Clients' own numbers stay unique by their client."""

    def __init__(self, plan: Plan) -> None:
        self._scheduler = Scheduler(SchedulerParams(max_decode_sequences=plan.batch), exclusive_sessions=True)
        self._steps: dict[int, Any] = {}
        self._batch: list[int] = []

    @property
    def may_go(self) -> bool:
        """The engine is free, and a step is queued."""
        return not self._batch and self._scheduler.has_work

    def submit(self, client: int, request: int, session: int, tokens: Sequence[int], step: Any) -> None:
        number = client * _PER_CLIENT + request
        self._steps[number] = step
        self._scheduler.submit(Request(number, client * _PER_CLIENT + session, tokens))

    def take(self) -> list[Any]:
        """The next batch; the engine has it now."""
        self._batch = [request.request_id for request in self._scheduler.get_work().requests]
        return [self._steps[number] for number in self._batch]

    def settle(self, answers: Sequence[Sequence[int]]) -> dict[int, list[tuple[Any, int]]]:
        """The batch is done. For each client its steps, and their indices in the batch."""
        mine: dict[int, list[tuple[Any, int]]] = {}
        for index, (number, tokens) in enumerate(zip(self._batch, answers, strict=True)):
            self._scheduler.complete(number, tokens)
            mine.setdefault(number // _PER_CLIENT, []).append((self._steps.pop(number), index))
        self._batch = []
        return mine


class Echoing:
    """The engine: echo's hash and echo's rows. Sessions are any hashable."""

    def __init__(self, plan: Plan) -> None:
        self._vocab = plan.vocab
        self._hashes: dict[object, int] = defaultdict(int)
        self._row = ((np.arange(plan.vocab, dtype=np.int64) * 40503) & 0xFFFF).astype(np.float32)

    def forward(self, sessions: Sequence[object], tokens: Sequence[Sequence[int]]) -> list[int]:
        """A token for each step."""
        hashes, vocab = self._hashes, self._vocab
        answers = []
        for session, step in zip(sessions, tokens, strict=True):
            h = hashes[session]
            for t in step:
                h = (MULTIPLIER * h + t + 1) & MASK
            hashes[session] = h
            answers.append((h >> 33) % vocab)
        return answers

    def fill(self, row: npt.NDArray[np.float32], token: int) -> None:
        """The raw logits that say ``token``, into float32 (vocab,)."""
        row[:] = self._row
        row[token] = PEAK

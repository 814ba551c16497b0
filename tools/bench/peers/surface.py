"""What the peers' clients give to their caller: ``session.submit`` and ``future.result``.

Made to cost as little as can be. One thread uses a client, so there is no lock; and nobody receives in the background: a
``result()`` that has no answer yet receives until it has. A ``concurrent.futures.Future`` promises more, and costs more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from shmsched import LogitsBlock, SamplingParams


class Answer(NamedTuple):
    """What a step gave: tokens, or logits."""

    tokens: Sequence[int]
    logits: LogitsBlock | None = None


class Pump(Protocol):
    """A client's end of a transport."""

    def submit(self, session: int, position: int, tokens: Sequence[int], sampling: SamplingParams | None) -> Future: ...

    def receive(self, timeout: float | None) -> None:
        """Wait for a message and settle the futures that it answers. Raises TimeoutError."""


class Future:
    """The answer to come of one step."""

    __slots__ = ("_pump", "answer")

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self.answer: Answer | None = None

    def result(self, timeout: float | None = None) -> Answer:
        while self.answer is None:
            self._pump.receive(timeout)
        return self.answer


class Session:
    """A session of a peer's client. It keeps its position, as ours does."""

    __slots__ = ("_number", "_position", "_pump")

    def __init__(self, pump: Pump, number: int) -> None:
        self._pump = pump
        self._number = number
        self._position = 0

    def submit(self, tokens: Sequence[int], *, sampling: SamplingParams | None) -> Future:
        future = self._pump.submit(self._number, self._position, tokens, sampling)
        self._position += len(tokens)
        return future

"""An engine that takes commands, and what its host makes of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shmsched.dataplane.layouts import StepStatus
from shmsched.engine import BatchView, Engine
from shmsched.workers.echo import PEAK, Echo, advance, answer

from support.peers.scheduler import Scheduler

VOCAB = 100
DONE, DEFERRED, FAILED = StepStatus.DONE, StepStatus.DEFERRED, StepStatus.FAILED

Start = Callable[[Engine], Scheduler]


def last(*tokens: int) -> int:
    return answer(advance(0, tokens), VOCAB)


class Commanded(Echo):
    """Echo, with tokens that are commands. What is deferred or failed is not taken."""

    DEFER, FAIL, RAISE, NOTHING, WILD, LONG = range(90, 96)

    def __init__(self) -> None:
        super().__init__(vocab=VOCAB)
        self.closed = 0

    def open_session(self, slot: int, options: bytes) -> None:
        if options == b"bad":
            raise ValueError("no adapter is named 'bad'")
        super().open_session(slot, options)

    def close(self) -> None:
        self.closed += 1

    def forward(self, batch: BatchView) -> None:
        for i, (slot, begin, length) in enumerate(batch.steps):
            hashes, mine = self._hashes[slot], batch.tokens[begin : begin + length].tolist()
            if self.RAISE in mine:
                raise RuntimeError("out of luck")
            if self.DEFER in mine:
                batch.defer(i)
                continue
            if self.FAIL in mine:
                batch.fail(i, f"slot {slot} will not")
                continue
            if self.LONG in mine:
                batch.fail(i, "€" * 100_000)
                continue
            assert len(hashes) - 1 == batch.positions[begin], "the host ran a step where its session does not stand"
            for t in mine:
                hashes.append(advance(hashes[-1], [t]))
            for k in np.flatnonzero((batch.outputs >= begin) & (batch.outputs < begin + length)).tolist():
                token = int(batch.tokens[batch.outputs[k]])
                if token == self.WILD:
                    batch.set_tokens(k, [VOCAB])
                elif token != self.NOTHING:
                    at = int(batch.positions[batch.outputs[k]])
                    batch.rows[k][:] = 0
                    batch.rows[k][answer(hashes[at + 1], VOCAB)] = PEAK


DEFER, FAIL, RAISE, NOTHING, WILD, LONG = range(90, 96)

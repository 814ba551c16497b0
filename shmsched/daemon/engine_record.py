"""What is remembered of the batches that an engine has run."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from shmsched.daemon.batch_in_flight import BatchInFlight

RECENT_BATCHES = 256


class BatchSummary(NamedTuple):
    """What ``status`` tells of a batch that ended."""

    number: int
    decodes: int
    prefill_chunks: int
    tokens: int
    seconds: float
    ended: float


class EngineRecord:
    """Steps, tokens and seconds of one incarnation, and its last batches."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.busy_s = 0.0
        self.recent: deque[BatchSummary] = deque(maxlen=RECENT_BATCHES)

    def add(self, batch: BatchInFlight, seconds: float) -> int:
        """The batch has ended, after so long. Returns how many tokens it had."""
        lengths = batch.lengths
        n_steps, n_tokens, decodes = len(lengths), sum(lengths), lengths.count(1)
        self.steps += n_steps
        self.tokens += n_tokens
        self.busy_s += seconds
        self.recent.append(BatchSummary(batch.number, decodes, n_steps - decodes, n_tokens, seconds, time.time()))
        return n_tokens

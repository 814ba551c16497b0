"""What is remembered of the batches that an engine has run."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from shmsched.dataplane.batches import Batch

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

    def add(self, batch: Batch, seconds: float) -> None:
        """The batch has ended, after so long."""
        n_steps = len(batch.steps)
        self.steps += n_steps
        self.tokens += batch.n_tokens
        self.busy_s += seconds
        n_chunks = n_steps - batch.n_decodes
        self.recent.append(BatchSummary(batch.number, batch.n_decodes, n_chunks, batch.n_tokens, seconds, time.time()))

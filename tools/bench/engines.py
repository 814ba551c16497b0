"""Echo that tells of itself, in place of a sampled token's log-probability."""

from __future__ import annotations

import time

from shmsched import BatchView
from shmsched.workers.echo import Echo


class Numbered(Echo):
    """The number of the batch: so a client sees in which its step ran. Exact to 16 million, as float32 is."""

    _batches = 0

    def logprob(self) -> float:
        self._batches += 1
        return float(self._batches)


class Clocked(Echo):
    """The milliseconds spent in ``forward`` so far: to a hundredth of one for two minutes, as float32 is."""

    _spent_s = 0.0
    _began = 0.0

    def forward(self, batch: BatchView) -> None:
        self._began = time.monotonic()
        super().forward(batch)
        self._spent_s += time.monotonic() - self._began

    def logprob(self) -> float:
        return 1000.0 * (self._spent_s + time.monotonic() - self._began)

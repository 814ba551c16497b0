"""Echo, with the milliseconds that it has spent in ``forward`` so far in place of a sampled token's log-probability."""

from __future__ import annotations

import time

from shmsched import BatchView
from shmsched.workers.echo import Echo


class Clocked(Echo):
    """To a hundredth of a millisecond for two minutes, as float32 is."""

    _spent_s = 0.0
    _began = 0.0

    def forward(self, batch: BatchView) -> None:
        self._began = time.monotonic()
        super().forward(batch)
        self._spent_s += time.monotonic() - self._began

    def logprob(self) -> float:
        return 1000.0 * (self._spent_s + time.monotonic() - self._began)

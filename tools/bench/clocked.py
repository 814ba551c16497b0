"""Echo, with the milliseconds that it has spent in ``forward`` so far in place of a sampled token's log-probability."""

from __future__ import annotations

import time

import numpy as np

from shmsched import BatchView
from shmsched.workers.echo import Echo


class Clocked(Echo):
    """To a hundredth of a millisecond for two minutes, as float32 is."""

    _spent_ms = 0.0

    def forward(self, batch: BatchView) -> None:
        began = time.monotonic()
        super().forward(batch)
        self._spent_ms += 1000.0 * (time.monotonic() - began)
        batch.set_tokens(0, batch.token_ids, np.full(len(batch.outputs), self._spent_ms, np.float32))

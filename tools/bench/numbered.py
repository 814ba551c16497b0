"""Echo, with the number of the batch in place of a sampled token's log-probability: so a client sees in which it ran."""

from __future__ import annotations

from shmsched.workers.echo import Echo


class Numbered(Echo):
    """Exact to 16 million batches, as float32 is."""

    _batches = 0

    def logprob(self) -> float:
        self._batches += 1
        return float(self._batches)

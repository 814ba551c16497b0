"""What there is room for in what client and scheduler share."""

from __future__ import annotations

from collections.abc import Sized

from shmsched.client.outbox import Outbox
from shmsched.client.submission import Submission
from shmsched.dataplane.rings import RecordReader
from shmsched.errors import InvalidRequest
from shmsched.saying import counted


class Room:
    """Cells of the token ring for what is submitted, and records and results for its answers. Guarded by the channel's lock."""

    def __init__(self, outbox: Outbox, pending: Sized, records: RecordReader, results: RecordReader) -> None:
        """``pending``: a record each is taken by what is in there."""
        self.results_taken = 0
        """By the sampled rows that are to come."""
        self._outbox = outbox
        self._pending = pending
        self._records = records.capacity
        self._results = results.capacity
        # What has been read is announced a quarter of the ring at a time: for more room than the rest one could wait for ever.
        self._most_tokens = outbox.ring.capacity * 3 // 4

    @property
    def cells(self) -> int:
        """Free ones of the token ring, what waits in the outbox counted as there."""
        ring = self._outbox.ring
        return ring.capacity - (ring.written - ring.read) - self._outbox.tokens

    @property
    def takes_a_decode(self) -> bool:
        """``lacking`` for one token, one step, and one sampled row."""
        return self.cells > 0 and len(self._pending) < self._records and self.results_taken < self._results

    def lacking(self, submission: Submission) -> str | None:
        """What there is no room for now, in words. Raises InvalidRequest, with the sizes, where no waiting would make room."""
        n, n_steps, n_results = submission.n_tokens, submission.n_steps, submission.n_results
        cells, pending = self.cells, len(self._pending)
        if n > self._most_tokens:
            raise InvalidRequest(f"{n} tokens in one submission; the token ring takes at most {self._most_tokens}")
        if n > cells:
            return f"{counted(n, 'token does', 'tokens do')} not fit the {cells} free cells of the token ring"
        if pending + n_steps > self._records:
            if n_steps > self._records:
                raise InvalidRequest(f"{n_steps} chunks in one submission; at most {self._records} are outstanding")
            return f"{counted(pending, 'step is', 'steps are')} outstanding, of at most {self._records}"
        if self.results_taken + n_results > self._results:
            if n_results > self._results:
                raise InvalidRequest(f"{n_results} sampled rows in one step; at most {self._results} are outstanding")
            return f"{counted(self.results_taken, 'sampled row is', 'sampled rows are')} outstanding, of at most {self._results}"
        return None

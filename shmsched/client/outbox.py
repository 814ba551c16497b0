"""What a client says to the scheduler, in order: steps together where they may go together, and everything else behind them."""

from __future__ import annotations

from itertools import chain
from typing import Any

from shmsched.memory.ring import RecordReader, TokenWriter
from shmsched.wire.client_frames import pack_submit
from shmsched.wire.link import Link

Packed = tuple[bytes, bytes, tuple[int, ...]]
"""Descriptors, tokens and stop tokens of a submission."""
MOST_TOGETHER = 1024
"""Submissions in one frame: far below what a frame may hold."""


class Outbox:
    """Steps that wait to be sent. Guarded by the channel's lock."""

    def __init__(
        self, link: Link, ring: TokenWriter, records: RecordReader, results: RecordReader, stream: RecordReader
    ) -> None:
        """``records``, ``results``, ``stream``: each frame says how far they were read."""
        self.ring = ring
        self.waiting: list[Packed] = []
        """Each submission that waits: they are sent with what follows, or by the next ``send_steps``."""
        self.tokens = 0
        """How many tokens those have. To be raised before one of them is there: where an interrupt comes between the two, there is
        room for less until they are sent, and not for more."""
        self._link = link
        self._records = records
        self._results = results
        self._stream = stream

    @property
    def full(self) -> bool:
        """No more may wait together."""
        return len(self.waiting) >= MOST_TOGETHER

    def send_steps(self) -> None:
        """Send what waits. Raises SchedulerDied if the connection is gone."""
        waiting = self.waiting
        if not waiting:
            return
        if len(waiting) == 1:
            steps, tokens, stops = waiting[0]
        else:
            described, laid, stopping = zip(*waiting, strict=True)
            steps, tokens = b"".join(described), b"".join(laid)
            stops = tuple(chain.from_iterable(stopping))
        written = self.ring.put(tokens)
        frame = pack_submit(written, self._records.read, self._results.read, self._stream.read, steps, stops)
        sent = self._link.frames_sent
        try:
            self._link.send_packed(frame)
        finally:
            # An interrupt may end the call and come right after the system call. It cannot come between these lines, for there is
            # no call among them: a ring that is ahead of what frames have announced would end the connection.
            if self._link.frames_sent != sent:
                self.ring.written = written
                self.waiting = []
                self.tokens = 0

    def send(self, message: Any) -> None:
        """Send another frame, behind the steps that were submitted before it. Raises SchedulerDied."""
        self.send_steps()
        self._link.send(message)

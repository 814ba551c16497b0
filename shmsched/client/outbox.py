"""What a client says to the scheduler, in order: steps together where they may go together, and everything else behind them."""

from __future__ import annotations

from itertools import chain
from typing import Any

from shmsched import failpoints
from shmsched.dataplane.descriptors import pack_submit
from shmsched.dataplane.rings import RecordReader, TokenWriter
from shmsched.errors import SchedulerDied
from shmsched.wire.codec import pack
from shmsched.wire.framing import framed
from shmsched.wire.link import Link, Outgoing, outgoing

Packed = tuple[bytes, bytes, tuple[int, ...]]
"""Descriptors, tokens and stop tokens of a submission."""
MOST_TOGETHER = 1024
"""Submissions in one frame: far below what a frame may hold."""


_Leaving = tuple[Outgoing, int, list[Packed], int]
"""Steps that go now: their frame, up to where the ring is written then, and what waited, of which those are the first so many."""


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
        """How many tokens those have."""
        self._link = link
        self._records = records
        self._results = results
        self._stream = stream
        self.leaving: _Leaving | None = None
        """Decided: whoever sends next finishes it, where an interrupt came. A frame that was sent twice, or a ring that is ahead of
        what frames have announced, would end the connection."""

    @property
    def full(self) -> bool:
        """No more may wait together."""
        return len(self.waiting) >= MOST_TOGETHER

    def finish(self) -> None:
        """Send what was decided to go, where an interrupt came: the scheduler may have it, and speak of it."""
        if self.leaving is not None:
            try:
                self._leave(self.leaving)
            except SchedulerDied:
                # Whoever receives sees the same.
                pass

    def send_steps(self) -> None:
        """Send what waits. Raises SchedulerDied if the connection is gone."""
        if self.leaving is not None:
            self._leave(self.leaving)
        waiting = self.waiting
        if not waiting:
            return
        n = len(waiting)
        if n == 1:
            steps, tokens, stops = waiting[0]
        else:
            described, laid, stopping = zip(*waiting, strict=True)
            steps, tokens = b"".join(described), b"".join(laid)
            stops = tuple(chain.from_iterable(stopping))
        written = self.ring.put(tokens)
        frame = pack_submit(written, self._records.read, self._results.read, self._stream.read, steps, stops)
        self.leaving = leaving = [frame], written, waiting, n
        self._leave(leaving)

    def _leave(self, leaving: _Leaving) -> None:
        """May be done again, from anywhere in it."""
        frame, written, waiting, n = leaving
        failpoints.hit("client.submit.written")
        failpoints.hit("client.submit.half_sent", self._link.send_half, frame[0])
        self._link.send_packed(frame[0], frame)
        failpoints.hit("client.submit.sent")
        self.ring.written = written
        if self.waiting is waiting:
            self.waiting = waiting[n:]
        self.tokens = sum([len(tokens) for _, tokens, _ in self.waiting]) >> 2 if self.waiting else 0
        self.leaving = None

    def send(self, message: Any) -> None:
        """Send another frame, behind the steps that were submitted before it. Raises SchedulerDied."""
        self.send_steps()
        self._link.send(message)

    def send_once(self, frame: Outgoing) -> None:
        """The same, for one who may come again with it."""
        self.send_steps()
        self._link.send_packed(frame[0], frame)


def to_be_sent(message: Any) -> Outgoing:
    """For ``send_once``."""
    return outgoing(framed(pack(message)))

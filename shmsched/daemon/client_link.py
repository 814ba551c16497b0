"""One connected client: its memory, and what it is told."""

from __future__ import annotations

from typing import Any

from shmsched import failpoints
from shmsched.daemon.config import ClientLimits
from shmsched.dataplane.core import Core
from shmsched.dataplane.layouts import ClientLayout
from shmsched.dataplane.session import ClientPort, Session, Step
from shmsched.errors import ErrorCode, ProtocolError
from shmsched.memory.segment import Segment
from shmsched.wire import frames
from shmsched.wire.peer import Peer

LONGEST_MESSAGE = 1000
"""Characters of what an engine says that each of its steps' clients is told."""


class ClientLink(ClientPort):
    """The scheduler's side of one client."""

    arena: Segment | None

    def __init__(
        self, number: int, peer: Peer, segment: Segment, layout: ClientLayout, limits: ClientLimits, core: Core
    ) -> None:
        super().__init__(number, memoryview(segment.buffer), layout)
        self.peer = peer
        self.limits = limits
        self._core = core
        self.arenas_given = 0
        self.arena_requested = False
        self.models_told: set[str] = set()
        self.option_bytes = 0
        """Of its sessions that are not open yet."""
        self.segment_size = segment.size
        self._enough_tokens = self.ring.capacity // 4
        """Read since the client was told, so that it is told without anything to read."""
        self._told = frames.Completions(0, 0, 0, 0)
        self._told_at = 0.0

    # --- what it says ---------------------------------------------------------------------------------------------------

    def has_read(self, stream_read: int) -> None:
        """The client has read so much of its stream: generations that waited for room go on. Raises ProtocolError."""
        if not self.stream_read <= stream_read <= self.stream.written:
            raise ProtocolError(
                f"streamed tokens read up to {stream_read}; they are written from {self.stream_read} to {self.stream.written}"
            )
        self.stream_read = stream_read
        while self.unstreamed and self.stream_room:
            step, (token, logprob, waited) = next(iter(self.unstreamed.items()))
            del self.unstreamed[step]
            self.streamed(step, token, logprob, waited)
            self._core.touched_clients.add(self)
            step.entered = self._core.clock.now()
            self._core.queue(step.session.engine, [step], step.entered)

    def halt(self, session_id: int, request: int) -> None:
        """The outstanding step of the generation is its last."""
        session = self.sessions.get(session_id)
        step = session.generating if session is not None else None
        if step is not None and step.generation is not None and step.request == request:
            step.generation.further = 0

    # --- what it is told ------------------------------------------------------------------------------------------------

    @property
    def last_told(self) -> frames.Completions:
        """The last announcement."""
        return self._told

    @property
    def has_unannounced(self) -> bool:
        """Something was written for the client that it was not told of."""
        if self.closed:
            return False
        return (self.records.written, self.stream.written) != (self._told.records_written, self._told.stream_written)

    @property
    def has_room_to_return(self) -> bool:
        """That much of the token ring has been read."""
        return self.ring.read - self._told.tokens_read >= self._enough_tokens

    def can_hear_later(self, now: float, pause_s: float) -> bool:
        """Whether all that it would be told of is that parts of submissions have run; or a few tokens of generations that go on
        anyway, and it was told something less than ``pause_s`` ago.

        Each time that it is told takes 50 us of it and the daemon: of engines that take less than a step of that it hears
        several at once; and whoever waits for the answers of the same batch is told before.
        """
        if self.closed:
            return False
        streamed = self.stream.written != self._told.stream_written
        return (
            (now - self._told_at < pause_s if streamed else self.records.written != self._told.records_written)
            and not self.awaited
            and self.stream.written - self._told.stream_written <= self.stream.capacity // 4
            and not self.has_room_to_return
        )

    def tell_completions(self) -> None:
        """Announce what was written since the last time, if anything, or that much of the token ring is free."""
        if self.has_unannounced or (not self.closed and self.has_room_to_return):
            for ring in (self.records, self.results, self.stream):
                if ring.waiting:
                    ring.publish()
            failpoints.hit("daemon.completions.written")
            self._told = frames.Completions(
                self.records.written, self.results.written, self.stream.written, self.ring.read
            )
            self._told_at = self._core.clock.now()
            self.awaited = False
            self.peer.send(self._told)
            failpoints.hit("daemon.completions.half_sent", self.peer.flush_half)

    def tell_failed(self, code: ErrorCode, message: str, requests: list[int], rows_held: bool) -> None:
        # A generation's tokens come before the word that it failed, or nobody would know what they are.
        self.tell_completions()
        self.tell(frames.Failed(code, rows_held, message[:LONGEST_MESSAGE], tuple(requests)))

    def tell(self, message: Any, fd: int = -1) -> None:
        """Queue a frame for the client; nothing is said to one that is gone."""
        if not self.closed:
            self.peer.send(message, fd)

    def options_done(self, session: Session) -> None:
        """Its engine has them, or never will."""
        self.option_bytes -= len(session.options)
        session.options = b""

    def return_rows(self, step: Step) -> None:
        """No engine writes into the rows of a step that ended without an answer: they are the client's again."""
        if step.raw_rows:
            self.tell(frames.Returned((step.request,)))

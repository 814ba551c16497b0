"""What a client knows of its daemon: shared by the threads that ask and the one that receives."""

from __future__ import annotations

import time
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, NamedTuple

from shmsched.client.channel import Channel
from shmsched.client.models import Model
from shmsched.errors import ProtocolError, SchedulerUnreachable, ShmschedError, error_of
from shmsched.memory.layouts import ClientLayout
from shmsched.memory.segment import Segment
from shmsched.wire import frames
from shmsched.wire.link import Link

if TYPE_CHECKING:
    from shmsched.client.session import Session

HANDSHAKE_S = 10.0


class Opening(NamedTuple):
    """A session that was asked for."""

    answer: Future[Session]
    seed: int


class ClientState:
    """Models, sessions and questions under way. Guarded by the channel's lock, but for the models, which are replaced whole."""

    def __init__(self, channel: Channel, models: dict[str, Model], daemon_pid: int) -> None:
        self.channel = channel
        self.models = models
        self.daemon_pid = daemon_pid
        self.sessions: dict[int, Session] = {}
        self.opening: dict[int, Opening] = {}
        self.arena: Future[Segment] | None = None
        """The answer to the question for an arena, once asked."""
        self.stopping = False
        self.closed = False

    def end(self, error: ShmschedError) -> None:
        """The connection is over: every future and every question fails with ``error``, every session has ended."""
        self.channel.end(error)
        with self.channel.lock:
            opening = list(self.opening.values())
            self.opening.clear()
            for session in self.sessions.values():
                session.ended = session.ended or error
            self.sessions.clear()
            arena = self.arena
        for asked in opening:
            asked.answer.set_exception(error)
        if arena is not None and not arena.done():
            try:
                arena.set_exception(error)
            except InvalidStateError:
                pass


def shake_hands(link: Link, where: str) -> ClientState:
    """Receive what the daemon says to a new client: its models, then its welcome."""
    models: dict[str, Model] = {}
    deadline = time.monotonic() + HANDSHAKE_S
    while (left := deadline - time.monotonic()) > 0:
        arrived = link.receive(left)
        if arrived is None:
            raise SchedulerUnreachable(f"the daemon at {where} closed the connection during the greeting")
        state = None
        for message in arrived:
            if isinstance(message, frames.Welcome):
                layout = ClientLayout(message.ring_tokens, message.records, message.results)
                segment = Segment(link.descriptor(), layout.size)
                segment.close_descriptor()
                state = ClientState(Channel(link, message, segment), models, message.daemon_pid)
            elif isinstance(message, frames.Model):
                models[message.model] = Model.of(message)
            elif isinstance(message, frames.Refused):
                raise error_of(message.code, message.message)
            elif state is None or not isinstance(message, frames.Stopping):
                raise ProtocolError(f"the daemon began with a {type(message).__name__} frame")
        if state is not None:
            return state
    raise SchedulerUnreachable(f"the daemon at {where} did not greet within {HANDSHAKE_S:g} s")

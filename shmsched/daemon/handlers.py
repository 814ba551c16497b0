"""What each role may say, and what it means: clients, engines, and those who ask for status or a stop."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from shmsched import failpoints
from shmsched.daemon.connections import Connection
from shmsched.daemon.engine_link import EngineLink
from shmsched.daemon.loop import READ
from shmsched.daemon.parts import Parts
from shmsched.daemon.pidfds import pidfd_of
from shmsched.daemon.status import status_document
from shmsched.errors import ProtocolError
from shmsched.saying import say_trace
from shmsched.wire import frames


class ClientHandler:
    """A client's connection. It ends with the socket or with the process, whichever is seen first."""

    def __init__(self, parts: Parts, connection: Connection) -> None:
        self._parts = parts
        self._connection = connection
        # A child that inherited the socket by fork keeps it open, and would hide the end of file of a client that died.
        self._pidfd = pidfd_of(connection.peer.pid, "client's")
        try:
            self._link = parts.clients.welcome(connection.peer)
        except BaseException:
            if self._pidfd >= 0:
                os.close(self._pidfd)
            raise
        self._link.blame = partial(parts.connections.blame, connection)
        if self._pidfd >= 0:
            parts.loop.watch(
                self._pidfd, READ, lambda _: parts.connections.drop(connection, "the client's process ended")
            )

    def frame_received(self, message: Any) -> None:
        parts, link = self._parts, self._link
        match message:
            case frames.Submit():
                parts.lookout.begin()
                parts.admission.admit(link, message)
                if link.has_room_to_return:
                    parts.core.touched_clients.add(link)
                if message.stream_read != link.stream_read:
                    link.has_read(message.stream_read)
                parts.overload.submitted(self._connection, link, len(parts.clients.links))
            case frames.Consumed():
                link.unread(message.records_read, message.results_read)
                link.has_read(message.stream_read)
            case frames.Halt(session, request):
                link.halt(session, request)
            case frames.ForkSession():
                parts.sessions.fork_for(link, message)
            case frames.Cancel():
                parts.sessions.cancel_for(link, message)
            case frames.OpenSession():
                parts.sessions.open_for(link, message)
            case frames.CloseSession(session):
                parts.sessions.close_for(link, session)
            case frames.OpenArena(size):
                parts.clients.open_arena(link, size)
            case _:
                raise ProtocolError(f"a client sent a {type(message).__name__} frame")

    def connection_lost(self, why: str) -> None:
        failpoints.hit("daemon.client.lost")
        peer = self._link.peer
        if self._pidfd >= 0:
            self._parts.loop.unwatch(self._pidfd)
            os.close(self._pidfd)
        # It refers back to the connection, which must go now.
        self._link.blame = say_trace
        self._parts.telling.gone(self._link)
        self._parts.overload.gone(self._connection)
        if peer.overfull:
            seconds = self._parts.loop.clock.now() - peer.behind_since if peer.behind_since else 0.0
            self._parts.log(f"client {peer.name} is disconnected after {seconds:.1f} s behind: {why}")
        self._parts.clients.gone(self._link)


class EngineHandler:
    """An engine's connection: first its offer, then whether it started, then answers."""

    def __init__(self, parts: Parts, connection: Connection) -> None:
        self._parts = parts
        self._connection = connection
        self._link: EngineLink | None = None

    def frame_received(self, message: Any) -> None:
        parts, link = self._parts, self._link
        if link is None:
            if isinstance(message, frames.StartFailed):
                self._parts.engines.failed_to_start(self._connection.peer.pid, message.message)
                return
            if not isinstance(message, frames.Offer):
                raise ProtocolError(f"an engine sent {type(message).__name__} before its offer")
            self._link = self._parts.engines.offered(self._connection, message)
            return
        match message:
            case frames.Done():
                failpoints.hit("daemon.done.received")
                parts.outcomes.done(link, message)
                parts.core.touched_engines.add(link)
            case frames.Ready():
                self._parts.engines.ready(link)
            case frames.StartFailed(reason):
                self._parts.engines.failed_to_start(link.peer.pid, reason)
            case frames.SlotOpened(slot, number):
                self._parts.sessions.opened(link, slot, number)
            case frames.SlotRefused():
                self._parts.sessions.refused(link, message)
            case frames.BatchFailed():
                parts.outcomes.batch_failed(link, message)
                parts.core.touched_engines.add(link)
            case frames.Skipped():
                parts.outcomes.skipped(link, message)
                parts.core.touched_engines.add(link)
            case frames.Faulty(reason):
                self._parts.engines.faulty(link, reason)
            case _:
                raise ProtocolError(f"an engine sent a {type(message).__name__} frame")

    def connection_lost(self, why: str) -> None:
        failpoints.hit("daemon.engine.lost")
        if self._link is not None:
            self._parts.engines.lost(self._link, why)


class ControlHandler:
    """``shmsched status`` and ``shmsched stop``."""

    def __init__(self, parts: Parts, connection: Connection, stop: Callable[[float], None]) -> None:
        self._parts = parts
        self._connection = connection
        self._stop = stop

    def frame_received(self, message: Any) -> None:
        match message:
            case frames.AskStatus(batches):
                if self._connection.peer.outbound_bytes:
                    # A document takes milliseconds to make; a flood of questions would be everybody's wait.
                    raise ProtocolError("a status was asked for before the last one was taken")
                self._connection.peer.send(frames.Status(status_document(self._parts, batches)))
            case frames.Stop(drain_s):
                if not math.isfinite(drain_s):
                    raise ProtocolError(f"a drain time-out of {drain_s} seconds")
                drain = self._parts.config.drain_timeout_s if drain_s < 0 else drain_s
                self._connection.peer.send(frames.Stopping(drain))
                self._stop(drain)
            case _:
                raise ProtocolError(f"a control connection sent a {type(message).__name__} frame")

    def connection_lost(self, why: str) -> None:
        pass

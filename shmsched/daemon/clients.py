"""The connected clients: welcoming them, giving them memory, and what their end means."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable

from shmsched import failpoints
from shmsched.daemon.client_link import ClientLink
from shmsched.daemon.config import DaemonConfig
from shmsched.daemon.engine_link import EngineLink
from shmsched.daemon.loop import EventLoop
from shmsched.daemon.memory_budget import MemoryBudget
from shmsched.daemon.models import tell_models
from shmsched.daemon.sessions import Sessions
from shmsched.dataplane.core import Core
from shmsched.dataplane.layouts import ClientLayout
from shmsched.errors import ErrorCode, ProtocolError, SharedMemoryError, ShmschedError, SystemLimit
from shmsched.limits import no_thread
from shmsched.memory.segment import Segment
from shmsched.wire import frames
from shmsched.wire.peer import Peer

MOST_ARENAS = 256
"""How often a client may be given its arena: once, and again when it had no descriptor or address space for it."""


class Clients:
    """All clients by number, and the shared memory that they have."""

    def __init__(
        self,
        config: DaemonConfig,
        core: Core,
        loop: EventLoop,
        sessions: Sessions,
        engines: Callable[[], Iterable[EngineLink]],
    ) -> None:
        self.budget = MemoryBudget(config.max_shared_memory)
        self.links: dict[int, ClientLink] = {}
        self._config = config
        self._core = core
        self._loop = loop
        self._sessions = sessions
        self._engines = engines
        self._to_allocate: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        try:
            threading.Thread(target=self._allocate_all, name="shmsched-allocate", daemon=True).start()
        except RuntimeError as e:
            raise no_thread("making clients' arenas", e) from e

    def welcome(self, peer: Peer) -> ClientLink:
        """Give a new client its segment, and tell it of the models.

        Raises SharedMemoryError with the sizes, SystemLimit if there is no descriptor to pass it on.
        """
        failpoints.hit("daemon.hello.received")
        limits = self._config.client
        layout = ClientLayout(
            limits.ring_tokens, limits.outstanding_steps, limits.outstanding_results, limits.streamed_tokens
        )
        segment = self._make_segment(layout.size, f"client {peer.name}")
        number = next(self._core.numbers)
        link = ClientLink(number, peer, segment, layout, limits, self._core)
        self.links[number] = link
        tell_models(self._engines(), [link])
        arena = min(limits.arena_bytes, self._config.max_shared_memory)
        welcome = frames.Welcome(
            number, os.getpid(), layout.ring_tokens, layout.records, layout.results, layout.stream, arena
        )
        try:
            link.tell(welcome, segment.fd)
            failpoints.hit("daemon.welcome.half_sent", peer.flush_half)
        except SystemLimit:
            self.gone(link)
            raise
        finally:
            segment.close_descriptor()
        return link

    def gone(self, link: ClientLink) -> None:
        """Its queued steps leave their queues, its sessions close, its memory goes once no engine writes into it."""
        link.closed = True
        self._sessions.close_all_of(link, ErrorCode.SESSION_CLOSED, "its client is gone")
        del self.links[link.number]
        for engine in self._engines():
            engine.forget_client(link)
        self.budget.release(link.segment_size)
        if link.arena is not None:
            self.budget.release(link.arena.size)
            link.arena.close_descriptor()
        link.drop_memory()

    def open_arena(self, link: ClientLink, size: int) -> None:
        """Make the client's arena, off the loop: reserving a gigabyte takes a third of a second."""
        if link.arena is not None and link.arenas_given < MOST_ARENAS:
            # It could not map the one that it was given, and asks again.
            self._give_arena(link, link.arena)
            return
        if link.arena_requested or not 0 < size <= link.limits.arena_bytes:
            raise ProtocolError(f"an arena of {size} bytes; one of at most {link.limits.arena_bytes} is allowed")
        link.arena_requested = True
        what = f"the logits arena of client {link.peer.name}"
        try:
            self.budget.reserve(size, what)
        except SharedMemoryError as e:
            self._arena_refused(link, 0, e)
            return

        def allocate() -> None:
            try:
                arena = Segment.create(size, what, mapped=False)
            except Exception as e:
                # Whatever it was, the next client's arena is made by this thread too.
                error = e if isinstance(e, ShmschedError) else SharedMemoryError(f"{what} could not be made: {e!r}")
                self._loop.post(lambda: self._arena_refused(link, size, error))
            else:
                self._loop.post(lambda: self._arena_made(link, arena))

        self._to_allocate.put(allocate)

    def _make_segment(self, size: int, what: str) -> Segment:
        self.budget.reserve(size, what)
        try:
            return Segment.create(size, what)
        except SharedMemoryError:
            self.budget.release(size)
            raise

    def _allocate_all(self) -> None:
        for make in iter(self._to_allocate.get, None):
            make()
            # It knows its client, which may be gone by the time that the next one comes.
            del make

    def close(self) -> None:
        """End the thread that makes arenas."""
        self._to_allocate.put(None)

    def _arena_made(self, link: ClientLink, arena: Segment) -> None:
        failpoints.hit("daemon.arena.made")
        if link.closed:
            self.budget.release(arena.size)
            arena.close_descriptor()
            return
        if self._give_arena(link, arena):
            link.arena = arena
        else:
            self.budget.release(arena.size)
            arena.close_descriptor()
            link.arena_requested = False

    def _give_arena(self, link: ClientLink, arena: Segment) -> bool:
        try:
            link.tell(frames.Arena(arena.size), arena.fd)
        except SystemLimit as e:
            message = f"the logits arena of client {link.peer.name} is not passed on: {e}"
            link.tell(frames.ArenaRefused(ErrorCode.SHARED_MEMORY_LIMIT, message))
            return False
        link.arenas_given += 1
        return True

    def _arena_refused(self, link: ClientLink, reserved: int, error: ShmschedError) -> None:
        self.budget.release(reserved)
        link.arena_requested = False
        link.tell(frames.ArenaRefused(ErrorCode.of(error), str(error)))

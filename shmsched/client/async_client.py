"""The asynchronous client: on the running loop's reader, without a thread."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from shmsched.client.async_line import SubmissionLine
from shmsched.client.async_replies import AsyncReply, AsyncStream
from shmsched.client.async_session import AsyncSession, OpeningSession
from shmsched.client.collected import is_ours, say_dropped, weakly
from shmsched.client.flows import Flow, Until, awaited
from shmsched.client.opening import SessionOpener
from shmsched.client.state import Opening
from shmsched.client.submission import waiting_until
from shmsched.errors import ClientClosed, InvalidRequest, SchedulerDied, ShmschedError
from shmsched.saying import say_trace
from shmsched.wire.inbound import AT_ONCE
from shmsched.wire.link import Link

T = TypeVar("T")
MOST_STRIKES = 3
"""Exceptions in a row, before it is taken for a fault of the client."""
_links: set[Link] = set()
"""Of clients that are not closed: the collector would close the socket of one before its client could tell the loop."""


class AsyncClient(
    SubmissionLine, SessionOpener[AsyncSession, AsyncReply, AsyncStream, OpeningSession, AsyncIterator[str]]
):
    """A connection to a daemon for one event loop, asyncio's or uvloop's: ``async with shmsched.AsyncClient() as client``.

    Arguments and errors are those of ``Client``; they come from entering it, or from ``connect``. It belongs to the loop that it
    is connected in, with its sessions and all that comes from them: used in another loop, in none or from another thread, each
    call raises WrongLoop and does nothing. Cancelling a task that waits for a step or a generation cancels that step or
    generation.
    """

    _session_type = AsyncSession

    def __init__(
        self, *, socket: str | os.PathLike[str] | None = None, wait: float = 0.0, arena_bytes: int | None = None
    ) -> None:
        super().__init__(socket, wait, arena_bytes)
        self._flush_due = False
        self._strikes = 0
        """How often in a row an exception has kept it from handling what arrived."""

    async def connect(self) -> AsyncClient:
        """Connect and be greeted. Entering the client does it too."""
        if self._loop is not None:
            raise InvalidRequest("this client is connected already; make another one")
        loop = self._belongs_here()
        link = None
        try:
            link, state = await awaited(self._connecting(), self._wait_until)
            self._greeted(link, state)
            self._line = deque()
            self._make_session = self._session_maker()
            _links.add(link)
            link.on_outbound = weakly(self._flush_soon)
            loop.add_reader(link.fileno(), weakly(self._readable))
            self._connected = True
            return self
        except BaseException:
            self._connected = False
            self._loop = None
            if link is not None:
                _forget(loop, link)
            raise

    # --- sessions -------------------------------------------------------------------------------------------------------

    async def _drive(self, flow: Callable[..., Flow[T]], *arguments: Any) -> T:
        self._check_here()
        asked: list[Opening] = []
        try:
            return await awaited(flow(asked, *arguments), self._wait_until)
        except BaseException:
            self._give_up(asked)
            raise

    def _open_by(self, flow: Callable[..., Flow[AsyncSession]], *arguments: Any) -> OpeningSession:
        return OpeningSession(self, self._drive(flow, *arguments))

    async def _wait_until(self, until: Until) -> None:
        what: Any = until.what
        if what is None:
            await asyncio.sleep(until.left or 0.0)
        elif isinstance(what, Link):
            loop, readable = self._own_loop, asyncio.Event()
            loop.add_reader(what.fileno(), readable.set)
            try:
                async with asyncio.timeout(until.left):
                    await readable.wait()
            except TimeoutError:
                pass
            finally:
                loop.remove_reader(what.fileno())
        else:
            await asyncio.wait([what.pending() if isinstance(what, AsyncReply) else what], timeout=until.left)

    def _new_answer(self) -> asyncio.Future[Any]:
        return self._own_loop.create_future()

    def _refuse_in_callback(self, what: str) -> None:
        """No task is a callback."""

    # --- steps ----------------------------------------------------------------------------------------------------------

    async def _text(self, prompt: str, where: dict[str, Any], how: dict[str, Any]) -> AsyncIterator[str]:
        with waiting_until(how["deadline"]) as timeout:
            session = await self.open_session(timeout=timeout, **where)
        async with session:
            generation = session.generate(session.model.tokens_of(prompt), **how)
            generation.nothing_follows()
            async for text in generation.increments():
                yield text

    # --- the connection -------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        """Handle what has arrived. What an interrupt keeps from it is there for the next turn, a frame perhaps twice."""
        inbound, handle = self._link.inbound, self._state.handle
        try:
            arrived = inbound.arrived(AT_ONCE)
            if arrived is None:
                self._end(self._state.end_of_stream())
            else:
                for message in arrived:
                    handle(message, self._make_session)
                    inbound.handled()
            self._strikes = 0
        except ShmschedError as e:
            self._end(e)
        except BaseException as e:
            self._channel.interrupted()
            self._strikes += 1
            if self._strikes < MOST_STRIKES:
                # The loop hears of no more than comes from now on.
                self._own_loop.call_soon(weakly(self._readable))
                raise
            # The fault is ours; nobody may wait for this connection from now on.
            say_trace()
            self._end(ClientClosed(f"the client's reader failed with {type(e).__name__}: {e}. Make a new client"))

    def _send_steps(self) -> bool:
        # What waits in the outbox goes with what other tasks of this turn submit.
        if self._channel.full:
            self._channel.send_steps()
        self._flush_soon()
        return True

    def _flush_soon(self) -> None:
        if not self._flush_due:
            # Twice, since an interrupt may come when the loop has taken it out and it has not begun; and said after that, so that one
            # in between has it called again, and not never.
            self._own_loop.call_soon(self._flush_if_due)
            self._own_loop.call_soon(self._flush_if_due)
            self._flush_due = True

    def _flush_if_due(self) -> None:
        if self._flush_due:
            self._flush()

    def _flush(self) -> None:
        """Send what the tasks of this turn have submitted, all at once."""
        try:
            self._flush_due = False
            if self._state.closed:
                return
            if self._state.dropped:
                self._state.close_dropped()
            if self._channel.flush():
                self._own_loop.remove_writer(self._link.fileno())
            else:
                self._own_loop.add_writer(self._link.fileno(), self._flush)
        except SchedulerDied:
            # What it had still said is to be read first; then the end of the stream says the rest.
            self._own_loop.remove_writer(self._link.fileno())
        except BaseException:
            self._flush_soon()
            raise

    def _end(self, error: ShmschedError) -> None:
        _stop_watching(self._own_loop, self._link)
        self._state.end(error)

    async def close(self) -> None:
        """End the connection. What is outstanding fails with ClientClosed. Idempotent; logits that are held stay readable.

        Once its loop is closed, it may be called in any other.
        """
        if self._inherited or not self._connected or self._closed_up:
            return
        if not self._own_loop.is_closed():
            self._check_here()
        try:
            self._close_up()
        except BaseException:
            # An interrupt. What was begun is done; where a second one keeps it from that, closing it again does it.
            self._close_up()
            raise

    def _close_up(self) -> None:
        # Whoever waited for anything has gone with a loop that is closed.
        self._close_state(tell=not self._own_loop.is_closed())
        _forget(self._own_loop, self._link)
        self._has_closed()

    def _wake(self) -> None:
        try:
            self._own_loop.call_soon_threadsafe(self._close_dropped)
        except RuntimeError:
            # The loop is closed. The client closes with it, or when it is collected.
            pass

    def _close_dropped(self) -> None:
        if not self._state.closed:
            self._state.close_dropped()

    def __del__(self) -> None:
        # A half-made one has none of it.
        if not getattr(self, "_connected", False) or self._state.closed or self._inherited or not is_ours(self._pid):
            return
        self._state.closed = True
        link, loop = self._link, self._own_loop
        # The daemon sees the end at once, and the loop forgets the descriptor when it next runs.
        link.shutdown()
        try:
            loop.call_soon_threadsafe(_forget, loop, link)
        except RuntimeError:
            _forget(loop, link)
        say_dropped(f"the client of {self._path}", "use it in an `async with` block, or await its close()", self)

    async def __aenter__(self) -> AsyncClient:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _stop_watching(loop: asyncio.AbstractEventLoop, link: Link) -> None:
    if not (link.closed or loop.is_closed()):
        loop.remove_reader(link.fileno())
        loop.remove_writer(link.fileno())


def _forget(loop: asyncio.AbstractEventLoop, link: Link) -> None:
    _stop_watching(loop, link)
    link.close()
    _links.discard(link)

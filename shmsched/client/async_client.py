"""The asynchronous client: on the running loop's reader, without a thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import cast

from shmsched.arguments import flag, number, path, seconds
from shmsched.client.async_greeting import greeted
from shmsched.client.async_replies import AsyncReply
from shmsched.client.async_session import AsyncSession, OpeningSession
from shmsched.client.async_submitting import AsyncSubmitting
from shmsched.client.collected import is_ours, say_dropped, weakly
from shmsched.client.state import LAST_WORD_S, Opening
from shmsched.client.submission import waiting_until
from shmsched.client.text_request import check_text_request
from shmsched.errors import (
    ClientClosed,
    Full,
    InvalidRequest,
    SchedulerDied,
    ShmschedError,
    Unsupported,
)
from shmsched.params import GREEDY, OutputRows, SamplingParams
from shmsched.saying import say_trace
from shmsched.wire import frames
from shmsched.wire.inbound import AT_ONCE
from shmsched.wire.link import RETRY_S, Link
from shmsched.wire.socket_path import default_socket

MOST_STRIKES = 3
"""Exceptions in a row, before it is taken for a fault of the client."""
_links: set[Link] = set()
"""Of clients that are not closed: the collector would close the socket of one before its client could tell the loop."""


class AsyncClient(AsyncSubmitting):
    """A connection to a daemon for one event loop, asyncio's or uvloop's: ``async with shmsched.AsyncClient() as client``.

    Arguments and errors are those of ``Client``; they come from entering it, or from ``connect``. It belongs to the loop that it
    is connected in, with its sessions and all that comes from them: used in another loop, in none or from another thread, each
    call raises WrongLoop and does nothing. Cancelling a task that waits for a step or a generation cancels that step or
    generation.
    """

    def __init__(
        self, *, socket: str | os.PathLike[str] | None = None, wait: float = 0.0, arena_bytes: int | None = None
    ) -> None:
        super().__init__(arena_bytes)
        self._path = str(default_socket()) if socket is None else path("socket", socket)
        self._wait = number("wait", wait, 0, float("inf"))
        self._flush_due = False
        self._closed_up = False
        self._strikes = 0
        """How often in a row an exception has kept it from handling what arrived."""

    async def connect(self) -> AsyncClient:
        """Connect and be greeted. Entering the client does it too."""
        if self._loop is not None:
            raise InvalidRequest("this client is connected already; make another one")
        loop = self._belongs_here()
        link: Link | None = None
        try:
            attempts = Link.attempts(self._path, frames.Role.CLIENT, self._wait)
            while (link := next(attempts)) is None:
                await asyncio.sleep(RETRY_S)
            self._greeted(link, await greeted(link, self._path))
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

    def open_session(
        self,
        *,
        model: str | None = None,
        options: bytes = b"",
        seed: int | None = None,
        block: bool = True,
        timeout: float | None = None,
    ) -> OpeningSession:
        """Open a session, as ``Client.open_session`` does: ``await`` it, make it a task, or enter it with ``async with``."""
        self._check_here()
        return OpeningSession(self, self._open_session(model, options, seed, block, timeout))

    async def _open_session(
        self, model: str | None, options: bytes, seed: int | None, block: bool, timeout: float | None
    ) -> AsyncSession:
        self._check_here()
        self._check_usable()
        timeout = seconds("timeout", timeout)
        opening = self._to_open(asyncio.get_running_loop().create_future(), options, seed)
        try:
            self._ask_for_session(opening, model, block, timeout)
            return await self._opened(opening, f"model {model!r}" if model else "the daemon", timeout)
        except BaseException:
            # Out of time, cancelled or interrupted: whatever becomes of it, nobody will ever hold it.
            self._give_up_opening(opening)
            raise

    async def _opened(self, opening: Opening, what: str, timeout: float | None) -> AsyncSession:
        answer = cast("asyncio.Future[AsyncSession]", opening.answer)
        try:
            await asyncio.wait([answer], timeout=timeout)
            if answer.done() or not self._stop_waiting(opening):
                return await answer
            await asyncio.wait([answer], timeout=LAST_WORD_S)
            raise self._no_slot(what, timeout, answer.exception() if answer.done() else None)
        finally:
            if answer.done() and not answer.cancelled():
                # Nobody else may look at it.
                answer.exception()

    async def _fork(
        self, parent: AsyncSession, upto: int | None, seed: int | None, block: bool, timeout: float | None
    ) -> AsyncSession:
        self._check_here()
        timeout, block = seconds("timeout", timeout), flag("block", block)
        length = self._fork_length(parent, upto)
        scope = asyncio.timeout(timeout)
        try:
            async with scope:
                for reply in self._channel.outstanding_of(parent):
                    if isinstance(reply, AsyncReply):
                        await reply.wait_until_done()
                # One of them may have failed.
                length = self._fork_length(parent, length if upto is not None else None)
                history, stands = parent.history[:length], parent.stands_at(length)
                if parent.model.supports_fork:
                    opening = self._to_open(asyncio.get_running_loop().create_future(), parent.options, seed)
                    try:
                        self._ask_for_fork(opening, parent, length)
                        child = await self._opened(opening, "its engine", None)
                        self._forked_from(child, history, stands)
                        return child
                    except (Full, Unsupported):
                        if not block:
                            raise
                    except BaseException:
                        self._give_up_opening(opening)
                        raise
                child = await self.open_session(model=parent.model.name, options=parent.options, seed=seed, block=block)
                try:
                    if length:
                        await child.submit(history, output_rows=OutputRows.NONE)
                    child.rest(length, *stands)
                    return child
                except BaseException:
                    await child.close()
                    raise
        except TimeoutError:
            if not scope.expired():
                raise
            raise Full(f"session {parent.session_id} could not be forked within {timeout:g} s") from None

    async def _reopen(self, session: AsyncSession, timeout: float | None) -> None:
        self._check_here()
        fresh = await self.open_session(
            model=session.model.name, options=session.options, seed=session.seed, timeout=timeout
        )
        try:
            self._replace(session, fresh)
        except BaseException:
            if session.session_id != fresh.session_id:
                await fresh.close()
            raise

    def _make_session(self, opened: frames.SessionOpened, asked: Opening) -> AsyncSession:
        model = self._model_of(opened)
        return AsyncSession(self, opened.session, model, opened.engine, asked.seed, asked.options)

    # --- steps ----------------------------------------------------------------------------------------------------------

    def generate_text(
        self,
        prompt: str,
        *,
        model: str | None = None,
        max_new_tokens: int = 128,
        sampling: SamplingParams = GREEDY,
        stop: Sequence[str] = (),
        seed: int | None = None,
        options: bytes = b"",
        deadline: float | None = None,
    ) -> AsyncIterator[str]:
        """The text that ``model`` goes on with after ``prompt``, as ``Client.generate_text`` gives it."""
        self._check_here()
        self._check_usable()
        stop = check_text_request(prompt, model, max_new_tokens, sampling, stop, seed, options, deadline)

        async def increments() -> AsyncIterator[str]:
            with waiting_until(deadline) as timeout:
                session = await self.open_session(model=model, options=options, seed=seed, timeout=timeout)
            async with session:
                generation = session.generate(
                    session.model.tokens_of(prompt), max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, deadline=deadline
                )  # fmt: skip
                generation.nothing_follows()
                async for text in generation.increments():
                    yield text

        return increments()

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

    def _submitted(self) -> bool:
        """What waits in the outbox goes with what other tasks of this turn submit. The caller holds the lock. True."""
        if self._channel.outbox.full:
            self._channel.outbox.send_steps()
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
        self._stop_watching()
        self._state.end(error)

    def _stop_watching(self) -> None:
        loop = self._own_loop
        loop.remove_reader(self._link.fileno())
        loop.remove_writer(self._link.fileno())

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
        if self._own_loop.is_closed():
            # Whoever waited for anything has gone with the loop.
            self._close_state(tell=False)
        else:
            if not self._link.closed:
                self._stop_watching()
            self._close_state()
        self._link.close()
        _links.discard(self._link)
        # What is leased keeps the arena mapped; a closed client that somebody still refers to does not.
        self._channel.arena = self._state.arena = None
        self._closed_up = True

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
            link.close()
            _links.discard(link)
        say_dropped(f"the client of {self._path}", "use it in an `async with` block, or await its close()", self)

    async def __aenter__(self) -> AsyncClient:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _forget(loop: asyncio.AbstractEventLoop, link: Link) -> None:
    if not link.closed:
        loop.remove_reader(link.fileno())
        loop.remove_writer(link.fileno())
    link.close()
    _links.discard(link)

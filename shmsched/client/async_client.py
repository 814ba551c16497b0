"""The asynchronous client: on the running loop's reader, without a thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from shmsched.arguments import flag, number, path, seconds
from shmsched.arguments import text as text_of
from shmsched.client.async_greeting import greeted
from shmsched.client.async_replies import AsyncReply
from shmsched.client.async_session import AsyncSession, OpeningSession
from shmsched.client.async_submitting import AsyncSubmitting
from shmsched.client.collected import is_ours, say_dropped, weakly
from shmsched.client.state import LAST_WORD_S, Opening
from shmsched.client.submission import waiting_until
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
from shmsched.wire.link import RETRY_S, Link
from shmsched.wire.socket_path import default_socket

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

    async def connect(self) -> AsyncClient:
        """Connect and be greeted. Entering the client does it too."""
        if self._loop is not None:
            raise InvalidRequest("this client is connected already; make another one")
        loop = self._belongs_here()
        try:
            attempts = Link.attempts(self._path, frames.Role.CLIENT, self._wait)
            while (link := next(attempts)) is None:
                await asyncio.sleep(RETRY_S)
            try:
                state = await greeted(link, self._path)
            except BaseException:
                link.close()
                raise
        except BaseException:
            self._loop = None
            raise
        self._greeted(link, state)
        self._connected = True
        _links.add(link)
        link.on_outbound = weakly(self._flush_soon)
        loop.add_reader(link.fileno(), weakly(self._readable))
        return self

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
        """Open a session, as ``Client.open_session`` does: ``await`` it, or enter it with ``async with``."""
        self._check_here()
        return OpeningSession(self, self._open_session(model, options, seed, block, timeout))

    async def _open_session(
        self, model: str | None, options: bytes, seed: int | None, block: bool, timeout: float | None
    ) -> AsyncSession:
        self._check_here()
        self._check_usable()
        timeout = seconds("timeout", timeout)
        answer: asyncio.Future[AsyncSession] = asyncio.get_running_loop().create_future()
        number = self._ask_for_session(answer, model, options, seed, block, timeout)
        return await self._opened(answer, number, f"model {model!r}" if model else "the daemon", timeout)

    async def _opened(
        self, answer: asyncio.Future[AsyncSession], number: int, what: str, timeout: float | None
    ) -> AsyncSession:
        try:
            await asyncio.wait([answer], timeout=timeout)
            if answer.done() or not self._stop_waiting(number):
                return await answer
            await asyncio.wait([answer], timeout=LAST_WORD_S)
            said = answer.exception() if answer.done() else None
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled():
                # Nobody else will look at it.
                answer.exception()
            if self._channel.dead is None:
                self._give_up_opening(number)
            raise
        if not answer.done():
            self._give_up_opening(number)
        raise self._no_slot(what, timeout, said)

    async def _fork(
        self, parent: AsyncSession, upto: int | None, seed: int | None, block: bool, timeout: float | None
    ) -> AsyncSession:
        self._check_here()
        timeout, block = seconds("timeout", timeout), flag("block", block)
        length = self._fork_length(parent, upto)
        try:
            async with asyncio.timeout(timeout):
                for reply in self._channel.outstanding_of(parent):
                    if isinstance(reply, AsyncReply):
                        await reply.wait_until_done()
                # One of them may have failed.
                length = self._fork_length(parent, length if upto is not None else None)
                history, stands = parent.history[:length], parent.stands_at(length)
                if parent.model.supports_fork:
                    answer: asyncio.Future[AsyncSession] = asyncio.get_running_loop().create_future()
                    number = self._ask_for_fork(answer, parent, length, seed)
                    try:
                        child = await self._opened(answer, number, "its engine", None)
                    except (Full, Unsupported):
                        if not block:
                            raise
                    else:
                        self._forked_from(child, history, stands)
                        return child
                child = await self.open_session(model=parent.model.name, options=parent.options, seed=seed, block=block)
                try:
                    if length:
                        await child.submit(history, output_rows=OutputRows.NONE)
                    child.rest(length, *stands)
                except BaseException:
                    await child.close()
                    raise
                return child
        except TimeoutError:
            raise Full(f"session {parent.session_id} could not be forked within {timeout:g} s") from None

    async def _reopen(self, session: AsyncSession, timeout: float | None) -> None:
        self._check_here()
        fresh = await self.open_session(
            model=session.model.name, options=session.options, seed=session.seed, timeout=timeout
        )
        self._replace(session, fresh)

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
        text_of("prompt", prompt)
        return self._generate_text(prompt, model, max_new_tokens, sampling, stop, seed, options, deadline)

    async def _generate_text(
        self,
        prompt: str,
        model: str | None,
        max_new_tokens: int,
        sampling: SamplingParams,
        stop: Sequence[str],
        seed: int | None,
        options: bytes,
        deadline: float | None,
    ) -> AsyncIterator[str]:
        with waiting_until(deadline) as timeout:
            session = await self.open_session(model=model, options=options, seed=seed, timeout=timeout)
        async with session:
            tokens = session.model.tokenizer.encode(prompt, bos=True)
            generation = session.generate(
                tokens, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, deadline=deadline
            )
            generation.nothing_follows()
            async for text in generation.increments():
                yield text

    # --- the connection -------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            arrived = self._link.receive_ready()
            if arrived is None:
                self._end(self._state.end_of_stream())
                return
            for message in arrived:
                self._state.handle(message, self._make_session)
        except ShmschedError as e:
            self._end(e)
        except Exception as e:
            # The fault is ours; nobody may wait for this connection from now on.
            say_trace()
            self._end(ClientClosed(f"the client's reader failed with {type(e).__name__}: {e}"))

    def _submitted(self) -> None:
        """What waits in the outbox goes with what other tasks of this turn submit. The caller holds the lock."""
        if self._channel.outbox.full:
            self._channel.outbox.send_steps()
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._own_loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send what the tasks of this turn have submitted, all at once."""
        if self._state.closed:
            return
        try:
            if self._channel.flush():
                self._own_loop.remove_writer(self._link.fileno())
            else:
                self._own_loop.add_writer(self._link.fileno(), self._flush)
        except SchedulerDied:
            # What it had still said is to be read first; then the end of the stream says the rest.
            self._own_loop.remove_writer(self._link.fileno())
        finally:
            self._flush_due = False

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
        if self._inherited or not self._connected or self._state.closed:
            return
        if self._own_loop.is_closed():
            # Whoever waited for anything has gone with the loop.
            self._close_state(tell=False)
        else:
            self._check_here()
            self._stop_watching()
            self._close_state()
        self._link.close()
        _links.discard(self._link)
        # What is leased keeps the arena mapped; a closed client that somebody still refers to does not.
        self._channel.arena = self._state.arena = None

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
    loop.remove_reader(link.fileno())
    loop.remove_writer(link.fileno())
    link.close()
    _links.discard(link)

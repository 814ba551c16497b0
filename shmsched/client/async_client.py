"""The asynchronous client: on the running loop's reader, without a thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar, cast

from shmsched.client.async_greeting import greeted
from shmsched.client.async_replies import AsyncReply, AsyncStream
from shmsched.client.async_session import AsyncSession, OpeningSession
from shmsched.client.core import ClientCore
from shmsched.client.leases import ClientArena
from shmsched.client.replies import Reply
from shmsched.client.state import Opening
from shmsched.client.submission import LAST, Submission, continued
from shmsched.errors import (
    ClientClosed,
    Full,
    InvalidRequest,
    SchedulerDied,
    ShmschedError,
    Unsupported,
)
from shmsched.memory.segment import Segment
from shmsched.params import GREEDY, OutputRows, SamplingParams
from shmsched.saying import say_trace
from shmsched.steps import Response, Tokens
from shmsched.wire import frames
from shmsched.wire.link import RETRY_S, Link
from shmsched.wire.listener import default_socket

if TYPE_CHECKING:
    from shmsched.client.generation.course import Course

ReplyT = TypeVar("ReplyT", bound=Reply)


class AsyncClient(ClientCore):
    """A connection to a daemon for one event loop, asyncio's or uvloop's: ``async with shmsched.AsyncClient() as client``.

    Arguments and errors are those of ``Client``; they come from entering it, or from ``connect``. Everything is used from the
    loop's thread. Cancelling a task that waits for a step or a generation cancels that step or generation.
    """

    def __init__(
        self, *, socket: str | os.PathLike[str] | None = None, wait: float = 0.0, arena_bytes: int | None = None
    ) -> None:
        super().__init__(arena_bytes)
        self._path = os.fspath(socket or default_socket())
        self._wait = wait
        self._connected = False
        self._flush_due = False
        self._line = asyncio.Lock()
        """Held by the submission that waits for room; the others wait for that one, in order of arrival."""
        self._in_line = 0
        """How many wait for room, or for those who do: nobody goes before them. (The lock is free for a moment between two.)"""
        self._room: asyncio.Future[None] | None = None
        """Set when some room may have come back."""

    async def connect(self) -> AsyncClient:
        """Connect and be greeted. Entering the client does it too."""
        if self._connected:
            raise InvalidRequest("this client is connected already; make another one")
        self._loop = asyncio.get_running_loop()
        attempts = Link.attempts(self._path, frames.Role.CLIENT, self._wait)
        while (link := next(attempts)) is None:
            await asyncio.sleep(RETRY_S)
        try:
            state = await greeted(link, self._path)
        except BaseException:
            link.close()
            raise
        self._greeted(link, state)
        self._connected = True
        link.on_outbound = self._flush_soon
        self._loop.add_reader(link.fileno(), self._readable)
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
        return OpeningSession(self._open_session(model, options, seed, block, timeout))

    async def _open_session(
        self, model: str | None, options: bytes, seed: int | None, block: bool, timeout: float | None
    ) -> AsyncSession:
        self._check_usable()
        answer: asyncio.Future[AsyncSession] = self._loop.create_future()
        number = self._ask_for_session(answer, model, options, seed, block, timeout)
        return await self._opened(answer, number, f"model {model!r}" if model else "the daemon", timeout)

    async def _opened(
        self, answer: asyncio.Future[AsyncSession], number: int, what: str, timeout: float | None
    ) -> AsyncSession:
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            self._give_up_opening(number)
            raise self._no_slot(what, timeout or 0.0) from None
        except asyncio.CancelledError:
            if self._channel.dead is None:
                self._give_up_opening(number)
            raise

    async def _fork(
        self, parent: AsyncSession, upto: int | None, seed: int | None, block: bool, timeout: float | None
    ) -> AsyncSession:
        length = self._fork_length(parent, upto)
        try:
            async with asyncio.timeout(timeout):
                for reply in self._channel.outstanding_of(parent):
                    if isinstance(reply, AsyncReply):
                        await reply.wait_until_done()
                # One of them may have failed.
                length = self._fork_length(parent, length if upto is not None else None)
                history = parent.history[:length]
                if parent.model.supports_fork:
                    answer: asyncio.Future[AsyncSession] = self._loop.create_future()
                    number = self._ask_for_fork(answer, parent, length, seed)
                    try:
                        child = await self._opened(answer, number, "its engine", None)
                    except (Full, Unsupported):
                        if not block:
                            raise
                    else:
                        self._forked_from(child, history)
                        return child
                child = await self.open_session(model=parent.model.name, options=parent.options, seed=seed, block=block)
                try:
                    if length:
                        await child.submit(history, output_rows=OutputRows.NONE)
                except BaseException:
                    await child.close()
                    raise
                return child
        except TimeoutError:
            raise Full(f"session {parent.session_id} could not be forked within {timeout:g} s") from None

    async def _reopen(self, session: AsyncSession, timeout: float | None) -> None:
        fresh = await self.open_session(
            model=session.model.name, options=session.options, seed=session.seed, timeout=timeout
        )
        self._replace(session, fresh)

    def _make_session(self, opened: frames.SessionOpened, asked: Opening) -> AsyncSession:
        model = self._state.models[opened.model]
        return AsyncSession(self, opened.session, model, opened.engine, asked.seed, asked.options)

    # --- steps ----------------------------------------------------------------------------------------------------------

    async def generate_text(
        self,
        prompt: str,
        *,
        model: str | None = None,
        max_new_tokens: int = 128,
        sampling: SamplingParams = GREEDY,
        stop: Sequence[str] = (),
        seed: int | None = None,
        options: bytes = b"",
    ) -> AsyncIterator[str]:
        """The text that ``model`` goes on with after ``prompt``, as ``Client.generate_text`` gives it."""
        async with self.open_session(model=model, options=options, seed=seed) as session:
            tokens = session.model.tokenizer.encode(prompt, bos=True)
            generation = session.generate(tokens, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop)
            async for text in generation.increments():
                yield text

    async def _submit(
        self,
        session: AsyncSession,
        tokens: Tokens,
        position: int | None,
        sampling: SamplingParams | None,
        output_rows: OutputRows,
        deadline: float | None,
        block: bool,
        timeout: float | None,
    ) -> Response:
        reply = await self._begin(session, tokens, position, sampling, output_rows, deadline, block, timeout)
        try:
            return await reply.wait()
        except asyncio.CancelledError:
            self._channel.withdraw(reply)
            raise

    async def _begin(
        self,
        session: AsyncSession,
        tokens: Tokens,
        position: int | None,
        sampling: SamplingParams | None,
        output_rows: OutputRows,
        deadline: float | None,
        block: bool,
        timeout: float | None,
        course: Course | None = None,
    ) -> AsyncReply:
        """Put a step on its way, for one who waits for it later."""
        self._check_usable()
        reply = AsyncReply()
        if deadline is None and output_rows is LAST and not self._in_line:
            with self._channel.lock:
                if self._channel.submit_decode(session, tokens, position, sampling, course, reply):
                    self._submitted()
                    return reply
        submission = Submission(session, tokens, position, sampling, output_rows, deadline, course)
        return await self._send(submission, reply, block, timeout)

    async def _stream(
        self,
        session: AsyncSession,
        tokens: Tokens,
        sampling: SamplingParams,
        further: int,
        stop_tokens: tuple[int, ...],
        deadline: float | None,
        block: bool,
        timeout: float | None,
        course: Course | None = None,
    ) -> AsyncStream:
        submission = continued(session, tokens, sampling, further, stop_tokens, deadline, course)
        return await self._send(submission, AsyncStream(self._channel), block, timeout)

    async def _send(self, submission: Submission, reply: ReplyT, block: bool, timeout: float | None) -> ReplyT:
        """Submit, once there is room and those who came before have gone."""
        lacking: str | None = "other submissions wait for room already"
        if not self._in_line:
            if submission.raw_rows and self._channel.arena is None:
                # What others submit while the arena is made comes after this.
                async with self._next_in_line():
                    lacking = await self._try(submission, reply)
            else:
                lacking = await self._try(submission, reply)
            if lacking is None:
                return reply
        if not block:
            raise Full(f"{lacking}; submit with block=True to wait")
        try:
            async with asyncio.timeout(timeout), self._next_in_line():
                while (lacking := await self._try(submission, reply)) is not None:
                    self._room = self._loop.create_future()
                    self._channel.room_came = self._room_came
                    await self._room
        except TimeoutError:
            raise Full(f"{lacking}, and waiting {timeout:g} s did not change that") from None
        return reply

    @asynccontextmanager
    async def _next_in_line(self) -> AsyncIterator[None]:
        self._in_line += 1
        try:
            async with self._line:
                yield
        finally:
            self._in_line -= 1

    async def _try(self, submission: Submission, reply: Reply) -> str | None:
        """Submit it if there is room. Returns what is lacking."""
        while True:
            with self._channel.lock:
                lacking = self._channel.place(submission)
                if lacking is not None:
                    return lacking
                if not submission.raw_rows or self._channel.arena is not None:
                    self._channel.submit(submission, reply)
                    self._submitted()
                    return None
            await self._ensure_arena()

    def _submitted(self) -> None:
        """What waits in the outbox goes with what other tasks of this turn submit. The caller holds the lock."""
        if self._channel.outbox.full:
            self._channel.outbox.send_steps()
        self._flush_soon()

    def _room_came(self) -> None:
        room = self._room
        if room is not None and not room.done():
            room.set_result(None)

    async def _ensure_arena(self) -> None:
        state = self._state
        if state.arena is None:
            size = self._arena_size()
            state.arena = self._loop.create_future()
            self._channel.outbox.send(frames.OpenArena(size))
        answer = cast("asyncio.Future[Segment]", state.arena)
        try:
            segment = await asyncio.shield(answer)
        finally:
            if state.arena is answer and answer.done() and answer.exception() is not None:
                # The next raw step may ask again: there may be room by then.
                state.arena = None
        if self._channel.arena is None:
            self._channel.arena = ClientArena(segment)

    def _check_usable(self) -> None:
        if not self._connected:
            raise InvalidRequest("this client is not connected; enter it with `async with`, or await client.connect()")
        super()._check_usable()

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

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send what the tasks of this turn have submitted, all at once."""
        if self._state.closed:
            return
        try:
            if self._channel.flush():
                self._loop.remove_writer(self._link.fileno())
            else:
                self._loop.add_writer(self._link.fileno(), self._flush)
        except SchedulerDied:
            # What it had still said is to be read first; then the end of the stream says the rest.
            self._loop.remove_writer(self._link.fileno())
        finally:
            self._flush_due = False

    def _end(self, error: ShmschedError) -> None:
        self._loop.remove_reader(self._link.fileno())
        self._loop.remove_writer(self._link.fileno())
        self._state.end(error)

    async def close(self) -> None:
        """End the connection. What is outstanding fails with ClientClosed. Idempotent; logits that are held stay readable."""
        if self._inherited or not self._connected or self._state.closed:
            return
        self._loop.remove_reader(self._link.fileno())
        self._loop.remove_writer(self._link.fileno())
        self._close_state()
        self._link.close()
        # What is leased keeps the arena mapped; a closed client that somebody still refers to does not.
        self._channel.arena = self._state.arena = None

    async def __aenter__(self) -> AsyncClient:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

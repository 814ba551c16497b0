"""What a client knows of its daemon, and how the daemon's frames change it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from typing import Any, Protocol

from shmsched import failpoints
from shmsched.client.arrivals import Arrivals
from shmsched.client.channel import Channel
from shmsched.client.models import Model
from shmsched.dataplane.layouts import ClientLayout
from shmsched.dataplane.session_core import SessionCore
from shmsched.errors import (
    ClientClosed,
    Full,
    ProtocolError,
    SchedulerDied,
    SchedulerStopped,
    SharedMemoryError,
    ShmschedError,
    error_of,
)
from shmsched.memory.segment import Segment
from shmsched.wire import frames
from shmsched.wire.link import Link

HANDSHAKE_S = 10.0
LAST_WORD_S = 1.0
"""How long to wait for why a session was not opened, beyond the time that its caller would wait for the session."""


class Answer(Protocol):
    """A future of either kind, a light one or asyncio's, that nobody has callbacks of his own at: it is settled under the lock."""

    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def result(self) -> Any: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...


class Opening:
    """A session that is asked for."""

    __slots__ = ("answer", "given_up", "number", "options", "seed")

    def __init__(self, answer: Answer, seed: int, options: bytes) -> None:
        self.answer = answer
        self.seed = seed
        self.options = options
        self.number: int | None = None
        """Once it may have been asked."""
        self.given_up = False
        """It is not waited for any longer, but for why it was not opened."""


MakeSession = Callable[[frames.SessionOpened, Opening], SessionCore | None]
"""Makes what the scheduler has opened; None where the client that asked for it is gone."""


class ClientState:
    """Models, sessions and questions under way. Guarded by the channel's lock, but for the models, which are replaced whole."""

    def __init__(self, link: Link, channel: Channel, models: dict[str, Model], daemon_pid: int) -> None:
        self.channel = channel
        self.arrivals = Arrivals(channel)
        self.models = models
        self.daemon_pid = daemon_pid
        self.sessions: dict[int, weakref.ref[SessionCore]] = {}
        """By number those that have not ended. Whoever uses a session keeps it; one that nobody keeps is closed."""
        self.dropped: deque[int] = deque()
        """Sessions that were collected before they were closed. Finalizers append to it, with no lock."""
        self.opening: dict[int, Opening] = {}
        self.arena: Answer | None = None
        """The answer to the question for an arena, once asked."""
        self.mapping = False
        """The arena's descriptor was taken, and nobody else will get another one."""
        self.stopping = False
        self.closed = False
        self._link = link

    # --- frames ---------------------------------------------------------------------------------------------------------

    def handle(self, message: Any, make_session: MakeSession) -> None:
        """One frame from the daemon. Raises what it says where it lets the client go, or ProtocolError."""
        match message:
            case frames.Completions():
                self.arrivals.completions(message)
            case frames.Failed():
                self.arrivals.failed(message)
            case frames.Returned():
                self.arrivals.returned(message)
            case frames.SessionOpened():
                self.channel.under_lock(self._session_opened, message, make_session)
            case frames.SessionRefused():
                self.channel.under_lock(self._session_refused, message)
            case frames.SessionEnded():
                self.channel.under_lock(self._session_ended, message)
            case frames.Model():
                self.models = with_model(self.models, message)
            case frames.Arena(size):
                self._arena_came(size)
            case frames.ArenaRefused(code, text):
                if self.arena is not None:
                    _fail(self.arena, error_of(code, text))
            case frames.Stopping():
                self.stopping = True
            case frames.Refused(code, text):
                raise error_of(code, text)
            case _:
                raise ProtocolError(f"the daemon sent a client a {type(message).__name__} frame")

    # Each of these may be handled once more, where an interrupt came: what says that it was is the last to go.

    def _session_opened(self, message: frames.SessionOpened, make_session: MakeSession) -> None:
        number = message.session
        asked = self.opening.get(number)
        if asked is None:
            # Its opener gave up waiting, and its CloseSession is on the way.
            return
        if asked.given_up:
            # It was open before the scheduler heard of that, and is closed now.
            _fail(asked.answer, Full(""))
            self.opening.pop(number, None)
            return
        if not asked.answer.done():
            session = make_session(message, asked)
            if session is not None:
                asked.answer.set_result(session)
        opened = _held_by(asked.answer)
        if opened is None or opened.ended is not None:
            # Nobody waits for it any more, or nobody has it.
            self.send_close(number)
        else:
            self.sessions[number] = weakref.ref(opened)
        self.opening.pop(number, None)

    def _session_refused(self, message: frames.SessionRefused) -> None:
        asked = self.opening.get(message.session)
        if asked is not None:
            _fail(asked.answer, error_of(message.code, message.message))
            self.opening.pop(message.session, None)

    def _session_ended(self, message: frames.SessionEnded) -> None:
        lost = self.session(message.session)
        if lost is not None:
            lost.ended = error_of(message.code, message.message)
        self.sessions.pop(message.session, None)

    def _arena_came(self, size: int) -> None:
        if self.mapping:
            raise ClientClosed("an interrupt has kept the client from mapping its arena; make a new client")
        self.mapping = True
        try:
            segment = Segment(self._link.descriptor(), size)
        except SharedMemoryError as e:
            # The step that wanted it fails, and the next one asks again: everything else goes on.
            if self.arena is not None:
                _fail(self.arena, e)
        else:
            segment.close_descriptor()
            if self.arena is not None and not self.arena.done():
                self.arena.set_result(segment)
        self.mapping = False

    def session(self, number: int) -> SessionCore | None:
        """The session with this number, if it has not ended."""
        reference = self.sessions.get(number)
        return None if reference is None else reference()

    def close_dropped(self) -> None:
        """Tell the scheduler of sessions that were collected."""
        if self.dropped:
            self.channel.under_lock(self._close_dropped)

    def _close_dropped(self) -> None:
        while self.dropped:
            # Said before it is forgotten: an interrupt may come between. Said twice, it is ignored.
            self.sessions.pop(self.dropped[0], None)
            self.send_close(self.dropped[0])
            self.dropped.popleft()

    def send_close(self, number: int) -> None:
        """Of a session that may be open, under the lock: twice does no harm, and to close one that was never asked for does none."""
        if self.channel.dead is None:
            try:
                self.channel.send(frames.CloseSession(number))
                failpoints.hit("client.close_session.sent")
            except SchedulerDied:
                # Whoever receives sees the same and settles everything; closing has nothing left to do.
                pass

    # --- the end --------------------------------------------------------------------------------------------------------

    def end_of_stream(self) -> ShmschedError:
        """What it means that the daemon says nothing any more."""
        if self.stopping:
            return SchedulerStopped(f"the scheduler (pid {self.daemon_pid}) has stopped")
        return SchedulerDied(f"the scheduler (pid {self.daemon_pid}) ended without a word; make a new client")

    def end(self, error: ShmschedError) -> None:
        """The connection is over: everything outstanding and every question fails with ``error``, every session has ended."""
        self.arrivals.end(error)
        self.channel.under_lock(self._end_all, error)

    def _end_all(self, error: ShmschedError) -> None:
        for reference in self.sessions.values():
            session = reference()
            if session is not None:
                session.ended = session.ended or error
        for asked in self.opening.values():
            _fail(asked.answer, error)
        if self.arena is not None:
            _fail(self.arena, error)
        self.sessions.clear()
        self.opening.clear()


def _held_by(answer: Answer) -> SessionCore | None:
    """The session that it was given."""
    if not answer.done() or answer.cancelled() or answer.exception() is not None:
        return None
    session: SessionCore = answer.result()
    return session


def _fail(answer: Answer, error: ShmschedError) -> None:
    try:
        if not answer.done():
            answer.set_exception(error)
            # Nobody need ever ask: an asyncio future complains of that.
            answer.exception()
    except InvalidStateError:
        pass


def with_model(models: dict[str, Model], message: frames.Model) -> dict[str, Model]:
    """The models after the daemon has said this of one of them."""
    others = {name: model for name, model in models.items() if name != message.model}
    return {**others, message.model: Model.of(message)} if message.engines else others


class Greeting:
    """What the daemon says to a new client: its models, then its welcome."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._models: dict[str, Model] = {}

    def hear(self, arrived: list[Any]) -> ClientState | None:
        """The client's state once the welcome is here. Raises what the daemon says where it refuses the client."""
        state: ClientState | None = None
        for message in arrived:
            if isinstance(message, frames.Welcome):
                failpoints.hit("client.welcome.received")
                layout = ClientLayout(message.ring_tokens, message.records, message.results, message.stream)
                segment = Segment(self._link.descriptor(), layout.size)
                segment.close_descriptor()
                state = ClientState(self._link, Channel(self._link, message, segment), self._models, message.daemon_pid)
            elif isinstance(message, frames.Model):
                self._models = with_model(self._models, message)
                if state is not None:
                    state.models = self._models
            elif isinstance(message, frames.Refused):
                raise error_of(message.code, message.message)
            elif state is None or not isinstance(message, frames.Stopping):
                raise ProtocolError(f"the daemon began with a {type(message).__name__} frame")
            else:
                state.stopping = True
        return state

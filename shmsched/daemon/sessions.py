"""Opening sessions and ending them, however that comes about."""

from __future__ import annotations

from collections.abc import Callable

from shmsched import failpoints
from shmsched.daemon.client_link import ClientLink
from shmsched.daemon.engine_link import EngineLink
from shmsched.daemon.holders import by_process, in_words
from shmsched.daemon.loop import contained
from shmsched.daemon.placement import NoPlace, Placement
from shmsched.daemon.settling import Settling
from shmsched.daemon.state import Session, SessionState, Step
from shmsched.errors import ErrorCode, ProtocolError
from shmsched.saying import counted
from shmsched.wire import frames


class Sessions:
    """All sessions of all clients. ``open`` counts those that have not ended, waiting ones too."""

    def __init__(
        self,
        settling: Settling,
        placement: Placement,
        next_number: Callable[[], int],
        touched: Callable[[EngineLink], None],
    ) -> None:
        """``touched``: called with an engine that has one session less to wait for."""
        self._settling = settling
        self._placement = placement
        self._next_number = next_number
        self._touched = touched
        self._stopping = False
        self.open = 0
        self.slots_changed = False
        """A slot may have become free: whoever waits for one has to be looked at."""

    def open_for(self, link: ClientLink, message: frames.OpenSession) -> None:
        """A client asks for a session. Raises ProtocolError where the frame contradicts what the client was told."""
        if message.session in link.sessions:
            raise ProtocolError(f"session {message.session} is open already")
        if len(message.options) > frames.MAX_OPTIONS:
            raise ProtocolError(f"options of {len(message.options)} bytes; at most {frames.MAX_OPTIONS} are allowed")
        session = Session(self._next_number(), link, message.session, message.model, message.options)
        session.patient = message.block == frames.Block.UNTIL_GIVEN_UP
        link.sessions[message.session] = session
        link.option_bytes += len(message.options)
        self.open += 1
        if self._stopping:
            self._refuse_stopping(session)
        elif len(link.sessions) > link.limits.sessions:
            self.end(session, ErrorCode.FULL, f"a client has at most {link.limits.sessions} sessions")
        elif link.option_bytes > link.limits.option_bytes:
            what = f"options of {link.option_bytes} bytes wait to be taken by engines"
            self.end(session, ErrorCode.FULL, f"{what}; a client may have {link.limits.option_bytes} bytes of them")
        else:
            try:
                self._placement.place(session, bool(message.block))
            except NoPlace as e:
                self.end(session, e.code, e.message)
            if session.engine is not None:
                self._touched(session.engine)

    def fork_for(self, link: ClientLink, message: frames.ForkSession) -> None:
        """A client asks for a session that begins as another one stands. Raises ProtocolError as ``open_for``."""
        if message.session in link.sessions:
            raise ProtocolError(f"session {message.session} is open already")
        parent = link.sessions.get(message.parent)
        session = Session(self._next_number(), link, message.session, parent.model if parent else "", b"")
        link.sessions[message.session] = session
        self.open += 1
        if self._stopping:
            self._refuse_stopping(session)
        elif len(link.sessions) > link.limits.sessions:
            self.end(session, ErrorCode.FULL, f"a client has at most {link.limits.sessions} sessions")
        elif parent is None or parent.state is not SessionState.OPEN or parent.engine is None:
            self.end(session, ErrorCode.SESSION_CLOSED, f"session {message.parent} is not open; it cannot be forked")
        elif not parent.engine.offer.supports_fork:
            what = f"model {parent.engine.offer.model!r} cannot fork a session"
            self.end(session, ErrorCode.UNSUPPORTED, what)
        elif message.length > parent.held:
            what = f"session {message.parent} holds {counted(parent.held, 'token')} that nothing can change any more"
            self.end(session, ErrorCode.INVALID_REQUEST, f"{what}; it cannot be forked at {message.length}")
        elif not parent.engine.has_slot:
            held = in_words(by_process([parent.engine.holders]))
            what = f"every session slot of engine {parent.engine.offer.spec} is taken, held by {held}"
            self.end(session, ErrorCode.FULL, what)
        else:
            session.next_position = message.length
            parent.engine.fork(session, parent)
            self._touched(parent.engine)

    def close_for(self, link: ClientLink, client_id: int) -> None:
        """A client closes its session. One that is not open yet is refused: whoever gave up waiting is told who has the slots."""
        failpoints.hit("daemon.close_session.received")
        session = link.sessions.get(client_id)
        if session is None:
            return
        if session.state is SessionState.WAITING:
            self.end(session, ErrorCode.FULL, self._placement.full(session.model))
        elif session.state is SessionState.OPENING and session.engine is not None:
            what = f"engine {session.engine.offer.spec} (pid {session.engine.peer.pid}) has not opened the session yet"
            self.end(session, ErrorCode.FULL, what)
        else:
            self.end(session, ErrorCode.SESSION_CLOSED, "the session was closed", tell=False)

    def close_all_of(self, link: ClientLink, code: ErrorCode, message: str) -> None:
        for session in list(link.sessions.values()):
            with contained():
                self.end(session, code, message)

    def end(self, session: Session, code: ErrorCode, message: str, *, tell: bool = True) -> None:
        """The session is over: its steps are settled, its slot is free. Idempotent."""
        if session.state is SessionState.ENDED:
            return
        self._settling.fail_session(session, code, message)
        if tell:
            session.client.end_session(session, code, message)
        else:
            session.client.sessions.pop(session.client_id, None)
        if session.engine is not None:
            session.engine.close(session)
            self._touched(session.engine)
        else:
            self._placement.forget(session)
        session.client.options_done(session)
        session.state = SessionState.ENDED
        self.open -= 1
        self.slots_changed = True

    def spoilt(self, step: Step, message: str) -> None:
        """A step failed whose tokens its engine has taken and cannot give back: nothing can follow them."""
        session, engine = step.session, step.session.engine
        if engine is not None:
            self.end(
                session,
                ErrorCode.SESSION_LOST,
                f"session {session.client_id} is lost: its step at position {step.position} failed ({message}), and engine"
                f" {engine.offer.spec}, which has its tokens, {engine.rewinds.in_words}",
            )

    def opened(self, engine: EngineLink, slot: int, number: int) -> None:
        """The engine has opened the session that was asked for."""
        failpoints.hit("daemon.session.opened")
        session = engine.opening_answered(slot, number)
        self.slots_changed = True
        if session is not None:
            session.state = SessionState.OPEN
            session.client.options_done(session)
            limits = frames.SessionLimits(
                engine.offer.max_session_tokens,
                engine.limits.max_prefill_chunk_size,
                engine.rewinds,
                engine.offer.supports_fork,
            )
            session.client.tell(frames.SessionOpened(session.client_id, engine.number, engine.offer.model, limits))

    def refused(self, engine: EngineLink, message: frames.SlotRefused) -> None:
        """The engine would not open it."""
        session = engine.opening_answered(message.slot, message.session)
        self.slots_changed = True
        if session is not None:
            engine.close(session, refused=True)
            code = ErrorCode.UNSUPPORTED if message.code == ErrorCode.UNSUPPORTED else ErrorCode.ENGINE_ERROR
            self.end(session, code, f"engine {engine.offer.spec} did not open the session: {message.message}")

    def serve_waiting(self) -> None:
        """Open what can be opened now, if a slot may have become free since the last time."""
        while self.slots_changed:
            self.slots_changed = False
            opened, hopeless = self._placement.serve_waiting()
            for session in opened:
                assert session.engine is not None
                self._touched(session.engine)
            for session, no_place in hopeless:
                with contained():
                    self.end(session, no_place.code, no_place.message)

    def take_no_more(self) -> None:
        """From now on sessions are refused; so are those that wait."""
        self._stopping = True
        for session in self._placement.take_waiting():
            self._refuse_stopping(session)

    def _refuse_stopping(self, session: Session) -> None:
        self.end(session, ErrorCode.SCHEDULER_STOPPED, "the scheduler is stopping; it takes no new sessions")

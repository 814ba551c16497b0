"""Opening sessions and ending them, however that comes about."""

from __future__ import annotations

from shmsched import failpoints
from shmsched.daemon.client_link import LONGEST_MESSAGE, ClientLink
from shmsched.daemon.engine_link import EngineLink
from shmsched.daemon.holders import by_process, in_words
from shmsched.daemon.loop import contained
from shmsched.daemon.placement import NoPlace, Placement
from shmsched.dataplane.completions import Completions
from shmsched.dataplane.core import Core
from shmsched.dataplane.session import Session, SessionState, Step
from shmsched.dataplane.step import StepState
from shmsched.errors import ErrorCode, ProtocolError
from shmsched.saying import counted
from shmsched.wire import frames


class Sessions:
    """All sessions of all clients. ``open`` counts those that have not ended, waiting ones too."""

    def __init__(self, core: Core, completions: Completions, placement: Placement) -> None:
        self._core = core
        self._completions = completions
        self._placement = placement
        self._stopping = False
        self.open = 0
        self.slots_changed = False
        """A slot may have become free: whoever waits for one has to be looked at."""

    def open_for(self, link: ClientLink, message: frames.OpenSession) -> None:
        """A client asks for a session. Raises ProtocolError where the frame contradicts what the client was told."""
        if len(message.options) > frames.MAX_OPTIONS:
            raise ProtocolError(f"options of {len(message.options)} bytes; at most {frames.MAX_OPTIONS} are allowed")
        session = self._enter(link, message.session, message.model, message.options)
        if session is None:
            return
        session.patient = message.block == frames.Block.UNTIL_GIVEN_UP
        if link.option_bytes > link.limits.option_bytes:
            what = f"options of {link.option_bytes} bytes wait to be taken by engines"
            self.end(session, ErrorCode.FULL, f"{what}; a client may have {link.limits.option_bytes} bytes of them")
            return
        try:
            self._placement.place(session, bool(message.block))
        except NoPlace as e:
            self.end(session, e.code, e.message)
        if session.engine is not None:
            self._core.touched_engines.add(session.engine)

    def fork_for(self, link: ClientLink, message: frames.ForkSession) -> None:
        """A client asks for a session that begins as another one stands. Raises ProtocolError as ``open_for``."""
        parent = link.sessions.get(message.parent)
        session = self._enter(link, message.session, parent.model if parent else "", b"")
        if session is None:
            return
        engine: EngineLink | None = parent.engine if parent is not None else None
        if parent is None or parent.state is not SessionState.OPEN or engine is None:
            self.end(session, ErrorCode.SESSION_CLOSED, f"session {message.parent} is not open; it cannot be forked")
        elif not engine.offer.supports_fork:
            self.end(session, ErrorCode.UNSUPPORTED, f"model {engine.offer.model!r} cannot fork a session")
        elif message.length > parent.held:
            what = f"session {message.parent} holds {counted(parent.held, 'token')} that nothing can change any more"
            self.end(session, ErrorCode.INVALID_REQUEST, f"{what}; it cannot be forked at {message.length}")
        elif not engine.has_slot:
            held = in_words(by_process([engine.holders]))
            what = f"every session slot of engine {engine.offer.spec} is taken, held by {held}"
            self.end(session, ErrorCode.FULL, what)
        else:
            session.next_position = message.length
            engine.fork(session, parent)
            self._core.touched_engines.add(engine)

    def _enter(self, link: ClientLink, client_id: int, model: str, options: bytes) -> Session | None:
        """A new session of the client, which waits. None if it may have no other one: it is told so."""
        if client_id in link.sessions:
            raise ProtocolError(f"session {client_id} is open already")
        session = Session(next(self._core.numbers), link, client_id, model, options)
        link.sessions[client_id] = session
        link.option_bytes += len(options)
        self.open += 1
        if self._stopping:
            self._refuse_stopping(session)
        elif len(link.sessions) > link.limits.sessions:
            self.end(session, ErrorCode.FULL, f"a client has at most {link.limits.sessions} sessions")
        return None if session.state is SessionState.ENDED else session

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
        self._completions.fail_session(session, code, message)
        client: ClientLink = session.client
        if client.sessions.pop(session.client_id, None) is not None and tell:
            ended = frames.SessionEnded if session.state is SessionState.OPEN else frames.SessionRefused
            client.tell(ended(session.client_id, code, message[:LONGEST_MESSAGE]))
        if session.engine is not None:
            session.engine.close(session)
            self._core.touched_engines.add(session.engine)
        else:
            self._placement.forget(session)
        client.options_done(session)
        session.state = SessionState.ENDED
        self.open -= 1
        self.slots_changed = True

    def lose(self, session: Session, message: str) -> None:
        """What its engine holds of it is gone."""
        self.end(session, ErrorCode.SESSION_LOST, f"session {session.client_id} is lost: {message}")

    def spoilt(self, step: Step, message: str) -> None:
        """A step failed whose tokens its engine has taken and cannot give back: nothing can follow them."""
        engine: EngineLink | None = step.session.engine
        if engine is not None:
            what = f"its step at position {step.position} failed ({message}), and engine {engine.offer.spec}, which has its tokens,"
            self.lose(step.session, f"{what} {engine.rewinds.in_words}")

    def cancel_for(self, link: ClientLink, message: frames.Cancel) -> None:
        """A client cancels what is outstanding of its session from one of its step numbers on."""
        session = link.sessions.get(message.session)
        if session is None:
            return
        first = 2**63
        for number, step in reversed(session.outstanding.items()):
            if step.request < message.request:
                break
            first = number
        if _runs_past(session, message.position):
            what = f"a step was cancelled that its engine has taken already, and the engine {session.engine.rewinds.in_words}"
            self.lose(session, what)
            return
        self._completions.fail_from(session, first, message.position, ErrorCode.CANCELLED, "cancelled by its client")

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
                self._core.touched_engines.add(session.engine)
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


def _runs_past(session: Session, position: int) -> bool:
    """The engine has taken, or is taking, tokens from ``position`` on, and cannot give them back."""
    if session.engine is None or session.engine.rewinds.reach(position):
        return False
    queued = (step.position for step in session.outstanding.values() if step.state is StepState.QUEUED)
    return position < next(queued, session.next_position)

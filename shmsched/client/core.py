"""What the synchronous and the asynchronous client share: checking, describing and opening; everything but waiting."""

from __future__ import annotations

import os
import secrets
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shmsched import failpoints
from shmsched.arguments import flag, shown, text, whole, whole_or_none
from shmsched.client.channel import Channel
from shmsched.client.collected import is_ours, say_dropped
from shmsched.client.leases import ClientArena
from shmsched.client.models import Model
from shmsched.client.outbox import to_be_sent
from shmsched.client.session_core import SessionCore, closed_error
from shmsched.client.state import Answer, ClientState, Opening
from shmsched.dataplane.layouts import LOGIT_SIZE
from shmsched.errors import (
    ClientClosed,
    Full,
    InvalidRequest,
    ProtocolError,
    SchedulerDied,
    ShmschedError,
    UsedAfterFork,
)
from shmsched.not_copied import NotCopied
from shmsched.params import SamplingParams
from shmsched.wire import frames
from shmsched.wire.frames import Rewinds
from shmsched.wire.link import Link, Outgoing

if TYPE_CHECKING:
    from shmsched.client.generation.course import Course
    from shmsched.client.generation.effects import Begin, Rest

LEAST_ARENA = 64 << 20
LONGEST_NAME = 255
"""Bytes of a model's."""
BLOCK_TIMEOUT_S = 60.0
"""How long a submission waits for room unless it says otherwise."""
_clients: weakref.WeakSet[ClientCore] = weakref.WeakSet()


class ClientCore(NotCopied):
    """A connection to a daemon. Whoever inherits from it waits, each in its own way."""

    _link: Link
    _state: ClientState
    _channel: Channel

    def __init__(self, arena_bytes: int | None) -> None:
        self._pid = os.getpid()
        self._inherited = False
        """In a process that inherited the client by fork. Asking for the process's number each time is a system call."""
        self._arena_bytes = whole_or_none("arena_bytes", arena_bytes, 1, 2**63 - 1)
        self._next_session = 1

    def _greeted(self, link: Link, state: ClientState) -> None:
        self._link, self._state, self._channel = link, state, state.channel
        _clients.add(self)

    @property
    def models(self) -> Mapping[str, Model]:
        """The models that are served now, by name."""
        self._check_usable()
        return MappingProxyType(self._state.models)

    # --- the arena ----------------------------------------------------------------------------------------------------

    def _arena_size(self) -> int:
        most = self._channel.max_arena
        if self._arena_bytes is not None:
            if not 0 < self._arena_bytes <= most:
                raise InvalidRequest(f"arena_bytes is {self._arena_bytes}; the daemon allows 1 to {most}")
            return self._arena_bytes
        # An open session's engine may take larger chunks than all engines of its model do.
        open_now = [reference() for reference in list(self._state.sessions.values())]
        models = [*self._state.models.values(), *(session.model for session in open_now if session is not None)]
        rows = max(((m.max_prefill_chunk_size + 64) * m.info.vocab_size for m in models), default=0)
        return min(most, max(LEAST_ARENA, rows * LOGIT_SIZE))

    def _ask_for_arena(self, answer: Answer) -> Answer:
        """Under the lock: what brings the arena. Raises InvalidRequest."""
        state = self._state
        if state.arena is None:
            self._channel.decide(self._arena_asked, answer, to_be_sent(frames.OpenArena(self._arena_size())))
            assert state.arena is not None
        return state.arena

    def _arena_asked(self, answer: Answer, frame: Outgoing) -> None:
        self._state.arena = answer
        try:
            self._channel.outbox.send_once(frame)
            failpoints.hit("client.open_arena.sent")
        except SchedulerDied:
            # Whoever receives sees the same, and fails the answer.
            pass

    def _arena_came(self, answer: Answer) -> None:
        """Under the lock: its answer is here. Raises SharedMemoryError with the sizes."""
        try:
            segment = answer.result()
        except ShmschedError:
            if self._state.arena is answer:
                # The next raw step may ask again: there may be room by then.
                self._state.arena = None
            raise
        if self._channel.arena is None:
            failpoints.hit("client.arena.received")
            self._channel.arena = ClientArena(segment)

    # --- sessions -------------------------------------------------------------------------------------------------------

    def _to_open(self, answer: Answer, options: bytes, seed: int | None) -> Opening:
        """What asks for a session; the answer comes to ``answer``. Raises InvalidRequest."""
        return Opening(answer, checked_seed(seed), checked_options(options))

    def _ask_for_session(self, opening: Opening, model: str | None, block: bool, timeout: float | None) -> None:
        model = checked_model(model)
        block = flag("block", block)
        how = frames.Block.NO
        if block:
            how = frames.Block.WHILE_ENGINES_COME if timeout is None else frames.Block.UNTIL_GIVEN_UP
        self._open(opening, lambda number: frames.OpenSession(number, how, model or "", opening.options))

    def _model_of(self, opened: frames.SessionOpened) -> Model:
        """The model of a session, as its own engine serves it. Raises ProtocolError."""
        model = self._state.models.get(opened.model)
        if model is None or len(opened.limits) < len(frames.SessionLimits._fields):
            raise ProtocolError(
                f"session {opened.session} of model {opened.model!r} is open, of which nothing was said"
            )
        return model.within(frames.SessionLimits(*opened.limits[: len(frames.SessionLimits._fields)]))

    def _no_slot(self, what: str, timeout: float | None, said: BaseException | None) -> BaseException:
        """That nobody opened a session in time, or the better reason that the scheduler has ``said``."""
        if said is not None and not isinstance(said, Full):
            return said
        why = f": {said}" if said is not None and str(said) else ""
        if not self._state.models:
            why = "; no engine is up, and `shmsched status` says why"
        return Full(f"no session slot of {what} became free within {timeout or 0.0:g} s{why}")

    def _stop_waiting(self, opening: Opening) -> bool:
        """Ask for nothing any more, and for a last word: who has the slots. It comes to the answer that was asked for. False if
        that is there."""
        return self._channel.under_lock(self._give_notice, opening)

    def _give_notice(self, opening: Opening) -> bool:
        number = opening.number
        if number is None or number not in self._state.opening:
            return False
        if not opening.given_up:
            self._state.send_close(number)
            opening.given_up = True
        return True

    def _ask_for_fork(self, opening: Opening, parent: SessionCore, length: int) -> None:
        self._open(opening, lambda number: frames.ForkSession(number, parent.session_id, length))

    def _open(self, opening: Opening, frame: Callable[[int], frames.OpenSession | frames.ForkSession]) -> None:
        # One of those may have the very slot that is wanted.
        self._state.close_dropped()
        self._channel.under_lock(self._ask, opening, frame)

    def _ask(self, opening: Opening, frame: Callable[[int], frames.OpenSession | frames.ForkSession]) -> None:
        self._check_usable()
        number = self._next_session
        self._next_session = number + 1
        opening.number = number
        self._state.opening[number] = opening
        try:
            question = frame(number)
            self._channel.outbox.send(question)
            failpoints.hit(
                "client.fork.sent" if isinstance(question, frames.ForkSession) else "client.open_session.sent"
            )
        except SchedulerDied as e:
            self._state.opening.pop(number, None)
            raise self._state.end_of_stream() from e

    def _give_up_opening(self, opening: Opening) -> bool:
        """Nobody will ever hold the session, whatever becomes of it. False if there is none: it was refused in this very moment,
        say."""
        if opening.number is None:
            return False
        return self._channel.under_lock(self._give_up_number, opening.number)

    def _give_up_number(self, number: int) -> bool:
        state = self._state
        if number not in state.opening and number not in state.sessions:
            return False
        session = state.session(number)
        if session is not None:
            session.ended = closed_error(number)
        state.send_close(number)
        state.opening.pop(number, None)
        state.sessions.pop(number, None)
        return True

    def _close_session(self, session: SessionCore) -> None:
        if self._inherited:
            return
        try:
            self._channel.under_lock(self._closed, session)
        except BaseException:
            # An interrupt. What was begun is done; where a second one keeps it from that, closing it again does it.
            self._channel.under_lock(self._closed, session)
            raise

    def _closed(self, session: SessionCore) -> None:
        number, state = session.session_id, self._state
        if session.ended is None:
            session.ended = closed_error(number)
        if state.session(number) is session:
            state.send_close(number)
            state.sessions.pop(number, None)

    def _session_collected(self, session: SessionCore) -> None:
        """Nobody refers any more to a session that was not closed."""
        if not is_ours(self._pid) or self._state.closed or self._channel.dead is not None:
            return
        if session.session_id not in self._state.sessions:
            # An interrupt has come before anybody had it; it is made once more.
            return
        session.ended = closed_error(session.session_id)
        self._state.dropped.append(session.session_id)
        self._wake()
        say_dropped(
            f"session {session.session_id} of model {session.model.name!r}",
            "use it in a `with` block (`async with`), or call its close()",
            session,
        )

    @abstractmethod
    def _wake(self) -> None:
        """Have sessions closed that were collected. It takes no lock."""

    def _replace(self, session: SessionCore, fresh: SessionCore) -> None:
        """``session``, which is lost, stands for ``fresh`` from now on."""
        self._channel.under_lock(self._channel.decide, self._replaced, session, fresh)

    def _replaced(self, session: SessionCore, fresh: SessionCore) -> None:
        number = fresh.session_id
        if session.session_id != number:
            session.become(fresh)
        if number in self._state.sessions:
            self._state.sessions[number] = weakref.ref(session)
        # Nobody has it but under the other name.
        fresh.ended = closed_error(number)

    def _settle(self, session: SessionCore) -> None:
        """What ``session`` stands at counts now: end what has only its end left to come."""
        self._channel.under_lock(session.settle)

    def _begin_course(self, session: SessionCore, course: Course, begin: Begin) -> None:
        """A generation of ``session`` begins. Raises InvalidRequest where another one goes on, or the session has moved."""

        def do() -> None:
            self._check_usable()
            session.begin(course, begin.position, begin.unfed)

        self._channel.under_lock(do)

    def _rest(self, session: SessionCore, course: Course, rest: Rest) -> None:
        """A generation of ``session`` has ended, and leaves it so."""
        stream = session._stream
        if session._course is course and stream is not None and not (stream.ended or stream.withdrawn):
            # An interrupt has come before the generation knew of it.
            if session.rewinds is Rewinds.ANYWHERE:
                stream.cancel()
            else:
                stream.halt()
        self._channel.under_lock(session.leave, course, rest.position, rest.unfed, rest.held)

    def _fork_length(self, parent: SessionCore, upto: int | None) -> int:
        return self._channel.under_lock(self._length_to_fork, parent, upto)

    def _length_to_fork(self, parent: SessionCore, upto: int | None) -> int:
        self._check_usable()
        parent.check_free(None)
        length = parent.position if upto is None else upto
        return whole("upto", length, 0, parent.position, where=f"(what session {parent.session_id} holds), or None")

    def _forked_from(
        self, child: SessionCore, tokens: npt.NDArray[np.int32], stands: tuple[int | None, str | None]
    ) -> None:
        """The engine has given ``child`` these tokens. ``stands``: as ``SessionCore.stands_at`` gave it of its parent."""

        def do() -> None:
            child.submitted(0, 0, tokens.tobytes())
            child.rest(len(tokens), *stands)

        self._channel.under_lock(do)

    def _check_usable(self) -> None:
        self._channel.check_alive()

    def _close_state(self, *, tell: bool = True) -> None:
        """Whatever ended it before: from here on it is closed. ``tell``: whether anybody can still wait for an answer."""
        error = ClientClosed("the client was closed; make another one")
        self._channel.dead = error
        self._state.closed = True
        if tell:
            self._state.end(error)

    def _forked(self) -> None:
        """In a forked child: its copy of the socket would hide this client's end from the daemon."""
        self._inherited = True
        self._channel.dead = UsedAfterFork(
            f"this client was made in process {self._pid}; make a new one in this process ({os.getpid()})"
        )
        self._link.abandon()


def checked_options(options: bytes) -> bytes:
    """An engine's options of a session. Raises InvalidRequest."""
    if not isinstance(options, bytes) or len(options) > frames.MAX_OPTIONS:
        size = len(options) if isinstance(options, bytes) else 0
        raise InvalidRequest(
            f"options are {f'{size} bytes' if size else shown(options)}; bytes, at most {frames.MAX_OPTIONS:,}, are wanted"
        )
    return options


def checked_model(model: str | None) -> str | None:
    """A model's name, or None. Raises InvalidRequest."""
    return None if model is None else text("model", model, most_bytes=LONGEST_NAME)


def checked_seed(seed: int | None) -> int:
    """``seed``, or one that is drawn. Raises InvalidRequest."""
    value = secrets.randbits(64) if seed is None else SamplingParams(seed=seed).seed
    assert value is not None
    return value


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)

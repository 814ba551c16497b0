"""The thread that receives what the daemon says, and settles futures with it."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

from shmsched.client.models import Model
from shmsched.client.session import Session
from shmsched.client.state import ClientState
from shmsched.errors import ClientClosed, ProtocolError, SchedulerDied, SchedulerStopped, ShmschedError, error_of
from shmsched.memory.segment import Segment
from shmsched.wire import frames
from shmsched.wire.link import Link

MakeSession = Callable[[frames.SessionOpened, int], Session]


class Receiver(threading.Thread):
    """Runs until the connection is over, and ends everything with the reason."""

    def __init__(self, link: Link, state: ClientState, make_session: MakeSession) -> None:
        super().__init__(name="shmsched-receiver", daemon=True)
        self._link = link
        self._state = state
        self._make_session = make_session

    def run(self) -> None:
        self._state.end(self._receive())
        if self._state.closed:
            self._link.close()

    def _receive(self) -> ShmschedError:
        """Handle frames until there are no more. Returns why."""
        pid = self._state.daemon_pid
        try:
            while (arrived := self._link.receive()) is not None:
                for message in arrived:
                    self._handle(message)
        except ShmschedError as e:
            return e
        except BaseException as e:
            # A callback may have raised SystemExit, or the fault is ours; nobody may wait for this thread from now on.
            traceback.print_exc()
            return ClientClosed(f"the client's receiver was ended by {type(e).__name__}: {e}")
        if self._state.stopping:
            return SchedulerStopped(f"the scheduler (pid {pid}) has stopped")
        return SchedulerDied(f"the scheduler (pid {pid}) ended without a word; make a new client")

    def _handle(self, message: Any) -> None:
        state = self._state
        match message:
            case frames.Completions():
                state.channel.completions(message)
            case frames.Failed():
                state.channel.failed(message)
            case frames.Returned():
                state.channel.returned(message)
            case frames.SessionOpened():
                self._session_opened(message)
            case frames.SessionRefused(session, code, text):
                with state.channel.lock:
                    asked = state.opening.pop(session, None)
                if asked is not None:
                    asked.answer.set_exception(error_of(code, text))
            case frames.SessionEnded(session, code, text):
                with state.channel.lock:
                    lost = state.sessions.pop(session, None)
                    if lost is not None:
                        lost.ended = error_of(code, text)
            case frames.Model():
                others = {name: model for name, model in state.models.items() if name != message.model}
                state.models = {**others, message.model: Model.of(message)} if message.engines else others
            case frames.Arena(size):
                segment = Segment(self._link.descriptor(), size)
                segment.close_descriptor()
                if state.arena is not None:
                    state.arena.set_result(segment)
            case frames.ArenaRefused(code, text):
                if state.arena is not None:
                    state.arena.set_exception(error_of(code, text))
            case frames.Stopping():
                state.stopping = True
            case frames.Refused(code, text):
                raise error_of(code, text)
            case _:
                raise ProtocolError(f"the daemon sent a client a {type(message).__name__} frame")

    def _session_opened(self, message: frames.SessionOpened) -> None:
        with self._state.channel.lock:
            asked = self._state.opening.pop(message.session, None)
            if asked is None:
                # Its opener gave up waiting, and its CloseSession is on the way.
                return
            session = self._make_session(message, asked.seed)
            self._state.sessions[message.session] = session
        asked.answer.set_result(session)

"""The synchronous client: thread-safe, with futures that a thread settles."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

from shmsched.arguments import flag, seconds, shown, whole
from shmsched.client.collected import is_ours, say_dropped
from shmsched.client.core import BLOCK_TIMEOUT_S
from shmsched.client.flows import Flow, Until, after, driven, left, wait_for_link
from shmsched.client.futures import StepFuture, WaitingStream
from shmsched.client.opening import SessionOpener
from shmsched.client.receiver import Receiver
from shmsched.client.session import Session
from shmsched.client.state import Opening
from shmsched.client.submission import submitted, waiting_until
from shmsched.client.submitting import ARENA
from shmsched.dataplane.session_core import closed_error
from shmsched.dataplane.submission import PendingResult, Submission
from shmsched.errors import Full, InvalidRequest, SchedulerDied, SystemLimit, UsedAfterFork
from shmsched.futures import LightFuture
from shmsched.limits import is_no_thread, lacking, no_thread
from shmsched.locks import Bell
from shmsched.memory.segment import Segment
from shmsched.params import RequestParams
from shmsched.steps import Request

T = TypeVar("T")


class Client(SessionOpener[Session, StepFuture, WaitingStream, Session, Iterator[str]]):
    """A connection to a daemon, with sessions and futures. Thread-safe; close it, or use it in a ``with`` block.

    socket: the daemon's socket; None for ``$SHMSCHED_SOCKET`` or the user's default.
    wait: seconds to wait for a daemon that is still starting.
    arena_bytes: shared memory for raw logits, made at the first raw step. None: room for one step of the largest chunk with
        all its rows and 64 rows more, at least 64 MiB, at most what the daemon allows.

    Raises SchedulerUnreachable if no daemon answers, ProtocolError if it speaks another protocol. After SchedulerDied it
    never reconnects by itself: what the sessions held is gone, and only the caller knows what to do about it.
    """

    _session_type = Session

    def __init__(
        self, *, socket: str | os.PathLike[str] | None = None, wait: float = 0.0, arena_bytes: int | None = None
    ) -> None:
        super().__init__(socket, wait, arena_bytes)
        link, receiver = None, None
        try:
            link, state = driven(self._connecting(), wait_for_link)
            receiver = Receiver(link, state, self._session_maker())
            receiver.start()
            self._greeted(link, state)
            self._new_step, self._line = partial(StepFuture, receiver), ()
            self._receiver = receiver
        except BaseException as e:
            if link is not None:
                # The receiver sees the end, if it has begun.
                link.shutdown()
                if receiver is None or not receiver.is_alive():
                    link.close()
            if is_no_thread(e):
                raise no_thread("a client", e) from e
            if isinstance(e, MemoryError):
                raise SystemLimit(f"there is no memory for a client: {lacking(e)}") from e
            raise

    # --- sessions -------------------------------------------------------------------------------------------------------

    def _drive(self, flow: Callable[..., Flow[T]], *arguments: Any) -> T:
        asked: list[Opening] = []
        try:
            return driven(flow(asked, *arguments), self._wait_until)
        except BaseException:
            self._give_up(asked)
            raise

    def _open_by(self, flow: Callable[..., Flow[Session]], *arguments: Any) -> Session:
        return self._drive(flow, *arguments)

    def _wait_until(self, until: Until) -> None:
        assert isinstance(until.what, LightFuture)
        self._receiver.wait_for(until.what, until.deadline)

    def _new_answer(self) -> LightFuture[Any]:
        return LightFuture()

    def _refuse_in_callback(self, what: str) -> None:
        self._receiver.refuse_in_callback(what)

    # --- steps ----------------------------------------------------------------------------------------------------------

    def _text(self, prompt: str, where: dict[str, Any], how: dict[str, Any]) -> Iterator[str]:
        with waiting_until(how["deadline"]) as timeout:
            session = self.open_session(timeout=timeout, **where)
        with session:
            generation = session.generate(session.model.tokens_of(prompt), **how)
            generation.nothing_follows()
            yield from generation.increments()

    def submit(
        self,
        request: Request,
        *,
        deadline: float | None = None,
        block: bool = True,
        block_timeout: float | None = BLOCK_TIMEOUT_S,
    ) -> StepFuture:
        """Submit one step as it stands, for those who keep positions themselves. It is never split.

        ``request.session_id`` is ``session.session_id`` of a session of this client. Raises InvalidRequest if the
        request id is outstanding or the step can never run, and what ``Session.submit`` raises.
        """
        self._check_usable()
        if not isinstance(request, Request):
            raise InvalidRequest(f"request is {shown(request)}; a Request is wanted")
        if not isinstance(request.params, RequestParams):
            raise InvalidRequest(f"params is {shown(request.params)}; a RequestParams is wanted")
        whole("request_id", request.request_id, 0, 2**63 - 1)
        reference = self._state.sessions.get(whole("session_id", request.session_id, 0, 2**63 - 1))
        session = None if reference is None else reference()
        if session is None:
            raise closed_error(request.session_id)
        asked = request.params
        submission = submitted(
            session,
            request.tokens,
            asked.position,
            asked.sampling,
            asked.output_rows,
            deadline,
            None,
            request.request_id,
        )
        return self._put(submission, self._new_step(), block, block_timeout)

    def _new_stream(self) -> WaitingStream:
        return WaitingStream(self._channel, self._receiver)

    def _send(self, submission: Submission, reply: PendingResult, block: bool, timeout: float | None) -> None:
        deadline, block, timeout = None, flag("block", block), seconds("block_timeout", timeout)
        while True:
            room = Bell()
            lacking = self._try(submission, reply, room.ring if block else None)
            if lacking is None:
                return
            if lacking is ARENA:
                self._have_arena()
                continue
            if not block:
                raise Full(f"{lacking}; submit with block=True to wait")
            self._receiver.refuse_in_callback(f"wait for room ({lacking})")
            if deadline is None:
                deadline = after(timeout)
            if not room.wait(left(deadline)):
                raise Full(f"{lacking}, and waiting {timeout:g} s did not change that")

    def _send_steps(self) -> bool:
        if self._receiver.expects_more() and not self._channel.full:
            return True
        try:
            self._channel.send_steps()
        except SchedulerDied as e:
            # The scheduler may have said why before it went; that is not read yet.
            raise self._state.end_of_stream() from e
        return True

    def _have_arena(self) -> None:
        """Raises SharedMemoryError with the sizes."""
        self._receiver.refuse_in_callback("wait for the logits arena; make the first raw step elsewhere")
        answer = self._channel.under_lock(self._ask_for_arena, LightFuture())
        self._receiver.wait_for(cast("LightFuture[Segment]", answer), None)
        self._channel.under_lock(self._arena_came, answer)

    def _can_wait_here(self, timeout: float) -> bool:
        """Whether a finalizer may send and wait where it runs: not on the thread that receives, nor on one that it has found
        with a lock of ours."""
        if self._receiver.handles_here() or not self._channel.lock.can_be_had(timeout):
            return False
        return self._link.can_send(timeout)

    def _holds_up_others(self) -> bool:
        return self._receiver.handles_here() or self._channel.lock.mine or self._link.sends_here

    # --- the end --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the connection. Outstanding futures fail with ClientClosed. Idempotent; logits that are held stay readable."""
        if self._inherited or self._closed_up:
            return
        try:
            self._disconnect()
            if threading.current_thread() is not self._receiver:
                self._receiver.join()
                self._link.close()
            self._has_closed()
        except BaseException:
            # An interrupt. From here on the receiver closes what is left.
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        self._close_state()
        self._link.shutdown()
        self._receiver.wake()

    def _wake(self) -> None:
        self._receiver.rouse()

    def __del__(self) -> None:
        # A half-made one has no receiver.
        receiver = getattr(self, "_receiver", None)
        if receiver is None or self._state.closed or self._inherited or not is_ours(self._pid):
            return
        self._state.closed = True
        # The thread reads the end of the stream, and does the rest.
        self._link.shutdown()
        say_dropped(f"the client of {self._path}", "use it in a `with` block, or call its close()", self)

    def __enter__(self) -> Client:
        if self._state.closed:
            self._check_usable()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forked(self) -> None:
        super()._forked()
        error = UsedAfterFork(f"this future belongs to a client of process {self._pid}; make a new Client in this one")
        for reply in self._channel.outstanding_replies():
            if isinstance(reply, StepFuture | WaitingStream):
                reply.fail_in_forked_child(error)

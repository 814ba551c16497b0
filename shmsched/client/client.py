"""The synchronous client: thread-safe, with futures that a thread settles."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, cast

from shmsched.arguments import flag, number, seconds, shown, whole
from shmsched.arguments import path as path_of
from shmsched.client.collected import is_ours, say_dropped
from shmsched.client.core import BLOCK_TIMEOUT_S
from shmsched.client.futures import StepFuture, WaitingStream
from shmsched.client.greeting import shake_hands
from shmsched.client.receiver import Receiver
from shmsched.client.session import Session, session_maker
from shmsched.client.session_core import closed_error
from shmsched.client.state import HANDSHAKE_S, LAST_WORD_S, Opening
from shmsched.client.submission import LAST, Submission, continued, waiting_until
from shmsched.client.submitting import Submitting
from shmsched.client.text_request import check_text_request
from shmsched.errors import (
    Full,
    InvalidRequest,
    SystemLimit,
    Unsupported,
    UsedAfterFork,
)
from shmsched.futures import LightFuture
from shmsched.limits import is_no_thread, lacking, no_thread
from shmsched.params import GREEDY, OutputRows, RequestParams, SamplingParams
from shmsched.steps import Request, Tokens
from shmsched.wire import frames
from shmsched.wire.link import Link
from shmsched.wire.socket_path import default_socket

if TYPE_CHECKING:
    from shmsched.client.generation.course import Course


class Client(Submitting):
    """A connection to a daemon, with sessions and futures. Thread-safe; close it, or use it in a ``with`` block.

    socket: the daemon's socket; None for ``$SHMSCHED_SOCKET`` or the user's default.
    wait: seconds to wait for a daemon that is still starting.
    arena_bytes: shared memory for raw logits, made at the first raw step. None: room for one step of the largest chunk with
        all its rows and 64 rows more, at least 64 MiB, at most what the daemon allows.

    Raises SchedulerUnreachable if no daemon answers, ProtocolError if it speaks another protocol. After SchedulerDied it
    never reconnects by itself: what the sessions held is gone, and only the caller knows what to do about it.
    """

    def __init__(
        self, *, socket: str | os.PathLike[str] | None = None, wait: float = 0.0, arena_bytes: int | None = None
    ) -> None:
        super().__init__(arena_bytes)
        self._closed_up = False
        path = self._path = str(default_socket()) if socket is None else path_of("socket", socket)
        wait = number("wait", wait, 0, float("inf"))
        link, receiver = None, None
        try:
            link = Link.connect(path, frames.Role.CLIENT, wait)
            state = shake_hands(link, path)
            receiver = Receiver(link, state, session_maker(self))
            receiver.start()
            self._greeted(link, state)
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

    def open_session(
        self,
        *,
        model: str | None = None,
        options: bytes = b"",
        seed: int | None = None,
        block: bool = True,
        timeout: float | None = None,
    ) -> Session:
        """Open a session on the least loaded engine of ``model`` (None: the only one that is served).

        options: bytes for the engine's ``open_session``, at most 65,536. seed: what sampling uses where a step names none;
        None draws one. Without a free slot this waits, up to ``timeout`` seconds, or raises Full with ``block=False``.
        Raises NoEngine, InvalidRequest, Unsupported or EngineError as the engine says, SessionLost where that ends meanwhile,
        SchedulerStopped, SchedulerDied.
        """
        self._check_usable()
        self._receiver.refuse_in_callback("open a session")
        timeout = seconds("timeout", timeout)
        opening = self._to_open(LightFuture(), options, seed)
        try:
            self._ask_for_session(opening, model, block, timeout)
            return self._opened(opening, f"model {model!r}" if model else "the daemon", timeout)
        except BaseException:
            # Out of time, or interrupted: whatever becomes of it, nobody will ever hold it.
            self._give_up_opening(opening)
            raise

    def _opened(self, opening: Opening, what: str, timeout: float | None) -> Session:
        answer = cast("LightFuture[Session]", opening.answer)
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._receiver.wait_for(answer, deadline) or not self._stop_waiting(opening):
            # Perhaps opened, or refused, in this very moment.
            return answer.result(HANDSHAKE_S)
        heard = self._receiver.wait_for(answer, time.monotonic() + LAST_WORD_S)
        raise self._no_slot(what, timeout, answer.exception(0) if heard else None)

    def _fork(self, parent: Session, upto: int | None, seed: int | None, block: bool, timeout: float | None) -> Session:
        timeout, block = seconds("timeout", timeout), flag("block", block)
        length = self._fork_length(parent, upto)
        self._receiver.refuse_in_callback("fork a session")
        deadline = None if timeout is None else time.monotonic() + timeout
        for reply in self._channel.outstanding_of(parent):
            if isinstance(reply, StepFuture) and not self._receiver.wait_for(reply, deadline):
                raise Full(f"session {parent.session_id} cannot be forked: its steps have not run within {timeout:g} s")
        # One of them may have failed.
        length = self._fork_length(parent, length if upto is not None else None)
        history, stands = parent.history[:length], parent.stands_at(length)
        if parent.model.supports_fork:
            opening = self._to_open(LightFuture(), parent.options, seed)
            try:
                self._ask_for_fork(opening, parent, length)
                child = self._opened(opening, "its engine", _left(deadline))
                self._forked_from(child, history, stands)
                return child
            except (Full, Unsupported):
                if not block:
                    raise
            except BaseException:
                self._give_up_opening(opening)
                raise
        child = self.open_session(
            model=parent.model.name, options=parent.options, seed=seed, block=block, timeout=_left(deadline)
        )
        try:
            if length:
                child.submit(history, output_rows=OutputRows.NONE).result(_left(deadline))
            child.rest(length, *stands)
            return child
        except BaseException:
            child.close()
            raise

    def _reopen(self, session: Session, timeout: float | None) -> None:
        fresh = self.open_session(model=session.model.name, options=session.options, seed=session.seed, timeout=timeout)
        try:
            self._replace(session, fresh)
        except BaseException:
            if session.session_id != fresh.session_id:
                fresh.close()
            raise

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
    ) -> Iterator[str]:
        """The text that ``model`` goes on with after ``prompt``, in increments at character boundaries, in a session of its own.

        The prompt gets the token for the beginning of a text in front. The text ends at the model's stop tokens, before a text of
        ``stop``, after ``max_new_tokens``, or when the session is full. Leaving the loop over it cancels the rest. deadline: as for
        ``Session.generate``; it holds for the wait for a slot too. Raises what ``open_session`` and ``Session.generate`` raise,
        Unsupported for a model without a tokenizer: InvalidRequest at the call, the others as its text begins.
        """
        self._check_usable()
        stop = check_text_request(prompt, model, max_new_tokens, sampling, stop, seed, options, deadline)

        def increments() -> Iterator[str]:
            with waiting_until(deadline) as timeout:
                session = self.open_session(model=model, options=options, seed=seed, timeout=timeout)
            with session:
                generation = session.generate(
                    session.model.tokens_of(prompt), max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, deadline=deadline
                )  # fmt: skip
                generation.nothing_follows()
                yield from generation.increments()

        return increments()

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
        submission = Submission(
            session,
            request.tokens,
            asked.position,
            asked.sampling,
            asked.output_rows,
            deadline,
            None,
            request.request_id,
        )
        reply = StepFuture(self._receiver)
        try:
            return self._send(submission, reply, block, block_timeout)
        except BaseException as e:
            self._not_submitted(reply, e)
            raise

    def _submit(
        self,
        session: Session,
        tokens: Tokens,
        position: int | None,
        sampling: SamplingParams | None,
        output_rows: OutputRows,
        deadline: float | None,
        block: bool,
        timeout: float | None,
        course: Course | None = None,
    ) -> StepFuture:
        reply, channel = StepFuture(self._receiver), self._channel
        try:
            if deadline is None and output_rows is LAST:
                with channel.lock:
                    # No branch here: what a tracer raises at the end of one belongs to no handler (Python 3.11).
                    is_on_its_way = (
                        channel.submit_decode(session, tokens, position, sampling, course, reply) and self._send_steps()
                    )
                if is_on_its_way:
                    return reply
            submission = Submission(session, tokens, position, sampling, output_rows, deadline, course)
            return self._send(submission, reply, block, timeout)
        except BaseException as e:
            self._not_submitted(reply, e)
            raise

    def _stream(
        self,
        session: Session,
        tokens: Tokens,
        sampling: SamplingParams,
        further: int,
        stop_tokens: tuple[int, ...],
        deadline: float | None,
        block: bool,
        timeout: float | None,
        course: Course | None = None,
    ) -> WaitingStream:
        submission = continued(session, tokens, sampling, further, stop_tokens, deadline, course)
        stream = WaitingStream(self._channel, self._receiver)
        try:
            return self._send(submission, stream, block, timeout)
        except BaseException as e:
            self._not_submitted(stream, e)
            raise

    def _can_wait_here(self, timeout: float) -> bool:
        """Whether a finalizer may send and wait where it runs: not on the thread that receives, nor on one that it has found
        with a lock of ours."""
        if self._receiver.handles_here() or not self._channel.lock.can_be_had(timeout):
            return False
        return self._link.can_send(timeout)

    def _holds_up_others(self) -> bool:
        """Whether what another thread is to do for the client may wait for this very one."""
        return self._receiver.handles_here() or self._channel.lock.mine or self._link.sends_here

    # --- the end --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the connection. Outstanding futures fail with ClientClosed. Idempotent; logits that are held stay readable."""
        if self._inherited or self._closed_up:
            return
        try:
            self._close_up()
        except BaseException:
            # An interrupt. From here on the receiver closes what is left.
            self._close_state()
            self._link.shutdown()
            self._receiver.wake()
            raise

    def _close_up(self) -> None:
        self._close_state()
        self._link.shutdown()
        self._receiver.wake()
        if threading.current_thread() is not self._receiver:
            self._receiver.join()
            self._link.close()
        # What is leased keeps the arena mapped; a closed client that somebody still refers to does not.
        self._channel.arena = self._state.arena = None
        self._closed_up = True

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forked(self) -> None:
        super()._forked()
        error = UsedAfterFork(f"this future belongs to a client of process {self._pid}; make a new Client in this one")
        for reply in self._channel.outstanding_replies():
            if isinstance(reply, StepFuture | WaitingStream):
                reply.fail_in_forked_child(error)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())

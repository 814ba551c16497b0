"""The client: a connection to a daemon, its sessions, and the thread that settles futures."""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from types import MappingProxyType, TracebackType

import numpy as np

from shmsched.client.channel import Submission
from shmsched.client.futures import StepFuture
from shmsched.client.leases import ClientArena
from shmsched.client.models import Model
from shmsched.client.receiver import Receiver
from shmsched.client.session import Session, closed_error
from shmsched.client.state import HANDSHAKE_S, Opening, shake_hands
from shmsched.client.tokens import as_tokens
from shmsched.errors import (
    ClientClosed,
    Full,
    InvalidRequest,
    SchedulerDied,
    Unsupported,
    UsedAfterFork,
)
from shmsched.memory.layouts import LOGIT
from shmsched.steps import OutputRows, Request, RequestParams, SamplingParams, Tokens
from shmsched.wire import frames
from shmsched.wire.link import Link
from shmsched.wire.listener import default_socket

LEAST_ARENA = 64 << 20
_clients: weakref.WeakSet[Client] = weakref.WeakSet()


class Client:
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
        self._pid = os.getpid()
        self._arena_bytes = arena_bytes
        self._next_session = 1
        path = os.fspath(socket or default_socket())
        self._link = Link.connect(path, frames.Role.CLIENT, wait)
        try:
            self._state = shake_hands(self._link, path)
        except BaseException:
            self._link.close()
            raise
        self._channel = self._state.channel
        self._receiver = Receiver(self._link, self._state, self._make_session)
        self._channel.receiver = self._receiver
        self._receiver.start()
        _clients.add(self)

    # --- what it offers -------------------------------------------------------------------------------------------------

    @property
    def models(self) -> Mapping[str, Model]:
        """The models that are served now, by name."""
        self._check_usable()
        return MappingProxyType(self._state.models)

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
        Raises NoEngine, InvalidRequest, Unsupported or EngineError as the engine says, SchedulerStopped, SchedulerDied.
        """
        self._check_usable()
        if not isinstance(options, bytes) or len(options) > frames.MAX_OPTIONS:
            raise InvalidRequest(
                f"options are {type(options).__name__} of length {len(options)}; bytes, at most 65,536, are wanted"
            )
        if threading.current_thread() is self._receiver:
            raise Full(
                "a future's callback cannot open a session: the answer comes to the thread that runs it; use another"
            )
        seed = secrets.randbits(64) if seed is None else SamplingParams(seed=seed).seed
        assert seed is not None
        answer: Future[Session] = Future()
        with self._channel.lock:
            self._check_usable()
            session_id, self._next_session = self._next_session, self._next_session + 1
            self._state.opening[session_id] = Opening(answer, seed)
            self._link.send(frames.OpenSession(session_id, block, model or "", options))
        try:
            return answer.result(timeout)
        except BaseException as e:
            # Out of time, or interrupted: whatever becomes of it, nobody will ever hold it.
            with self._channel.lock:
                asked = self._state.opening.pop(session_id, None) or self._state.sessions.pop(session_id, None)
                if asked is not None and self._channel.dead is None:
                    self._link.send(frames.CloseSession(session_id))
            if not isinstance(e, TimeoutError):
                raise
            if asked is None:
                # Refused in this very moment, with a better reason than that time is up.
                return answer.result(HANDSHAKE_S)
            what = f"model {model!r}" if model else "the daemon"
            raise Full(f"no session slot of {what} became free within {timeout:g} s") from None

    def submit(self, request: Request, *, block: bool = True, block_timeout: float | None = None) -> StepFuture:
        """Submit one step as it stands, for those who keep positions themselves. It is never split.

        ``request.session_id`` is ``session.session_id`` of a session of this client. Raises InvalidRequest if the
        request id is outstanding or the step can never run, and what ``Session.submit`` raises.
        """
        self._check_usable()
        session = self._state.sessions.get(request.session_id)
        if session is None:
            raise closed_error(request.session_id)
        tokens = as_tokens(request.tokens, session.vocab_size)
        chunk = session.model.max_prefill_chunk_size
        if len(tokens) > chunk:
            raise InvalidRequest(f"request {request.request_id} has {len(tokens)} tokens; a step has at most {chunk}")
        params = replace(request.params, output_rows=_output_rows(request.params.output_rows))

        def make() -> Submission:
            if self._channel.id_is_outstanding(request.request_id):
                raise InvalidRequest(f"request {request.request_id} is still outstanding; ids may repeat once settled")
            return Submission(session, request.request_id, [tokens], params.position, params, session.seed)

        with self._channel.lock:
            return self._send(make, params, block, block_timeout)

    def close(self) -> None:
        """End the connection. Outstanding futures fail with ClientClosed. Idempotent; logits that are held stay readable."""
        if self._pid != os.getpid() or self._state.closed:
            return
        self._state.closed = True
        self._state.end(ClientClosed("the client was closed"))
        self._link.shutdown()
        if threading.current_thread() is not self._receiver:
            self._receiver.join()
            self._link.close()
        # What is leased keeps the arena mapped; a closed client that somebody still refers to does not.
        self._channel.arena = self._state.arena = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- what its sessions ask of it ------------------------------------------------------------------------------------

    def _submit(
        self,
        session: Session,
        tokens: Tokens,
        position: int | None,
        sampling: SamplingParams | None,
        output_rows: OutputRows,
        block: bool,
        timeout: float | None,
    ) -> StepFuture:
        self._check_usable()
        array = as_tokens(tokens, session.vocab_size)
        output_rows = _output_rows(output_rows)
        size = session.model.max_prefill_chunk_size
        if output_rows is OutputRows.ALL and len(array) > size:
            raise InvalidRequest(f"output_rows=ALL with {len(array)} tokens; they must fit one chunk of {size}")
        chunks = [array[i : i + size] for i in range(0, len(array), size)] if len(array) > size else [array]

        def make() -> Submission:
            start = session._position if position is None else position
            request_id = self._channel.next_request_id()
            return Submission(
                session, request_id, chunks, start, RequestParams(start, sampling, output_rows), session.seed
            )

        with self._channel.lock:
            return self._send(make, RequestParams(0, sampling, output_rows), block, timeout)

    def _send(
        self, make: Callable[[], Submission], params: RequestParams, block: bool, timeout: float | None
    ) -> StepFuture:
        """Submit what ``make`` makes, once there is room. The caller holds the lock, which waiting gives up: so it is made
        and checked again after each wait, by what is true then."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if params.sampling is None and params.output_rows is not OutputRows.NONE:
            self._ensure_arena()
        while True:
            submission = make()
            self._check(submission)
            lacking = self._channel.lacking(submission)
            if lacking is None:
                break
            if not self._channel.wait_for_room(lacking, block, deadline):
                raise Full(f"{lacking}, and waiting {timeout:g} s did not change that")
        future = self._channel.submit(submission)
        end = int(submission.position) + submission.n_tokens
        submission.session.submitted(future.first_request, submission.position, end)
        return future

    def _check(self, submission: Submission) -> None:
        """Refuse what can never run as it stands."""
        params = submission.params
        if params.sampling is not None and not isinstance(params.sampling, SamplingParams):
            raise InvalidRequest(
                f"sampling is {params.sampling!r}; a SamplingParams, or None for raw logits, is wanted"
            )
        session, start = submission.session, submission.position
        self._check_usable()
        session.check_open()
        end = start + submission.n_tokens
        most = session.model.info.max_session_tokens
        if not isinstance(start, int | np.integer) or start < 0 or start > session._position:
            raise InvalidRequest(
                f"position {start!r} in session {session.session_id}; it goes on at {session._position}, or below to rewind"
            )
        if end > most:
            raise InvalidRequest(
                f"session {session.session_id} would hold {end} tokens; {session.model.info.model} takes at most {most}"
            )
        if start < session._position and not session.supports_rewind:
            raise Unsupported(
                f"position {start} rewinds session {session.session_id} from {session._position};"
                f" model {session.model.info.model!r} cannot rewind"
            )
        self._channel.check_fits(submission)

    def _close_session(self, session: Session) -> None:
        if self._pid != os.getpid():
            return
        with self._channel.lock:
            if session.ended is None:
                session.ended = closed_error(session.session_id)
                self._state.sessions.pop(session.session_id, None)
                if self._channel.dead is None:
                    try:
                        self._link.send(frames.CloseSession(session.session_id))
                    except SchedulerDied:
                        # The receiver sees the same and settles everything; closing has nothing left to do.
                        pass

    def _ensure_arena(self) -> None:
        """Have an arena. The lock is given up while the scheduler makes one. Raises SharedMemoryError with the sizes."""
        state = self._state
        if self._channel.arena is not None:
            return
        if threading.current_thread() is self._receiver:
            raise Full("a future's callback cannot wait for the logits arena; make the first raw step elsewhere")
        self._check_usable()
        if state.arena is None:
            size = self._arena_size()
            state.arena = Future()
            self._link.send(frames.OpenArena(size))
        answer = state.arena
        self._channel.lock.release()
        try:
            segment = answer.result()
        finally:
            self._channel.lock.acquire()
            if state.arena is answer and answer.done() and answer.exception() is not None:
                # The next raw step may ask again: there may be room by then.
                state.arena = None
        if self._channel.arena is None:
            self._channel.arena = ClientArena(segment)

    def _arena_size(self) -> int:
        most = self._channel.max_arena
        if self._arena_bytes is not None:
            if not 0 < self._arena_bytes <= most:
                raise InvalidRequest(f"arena_bytes is {self._arena_bytes}; the daemon allows 1 to {most}")
            return self._arena_bytes
        rows = max(
            ((m.max_prefill_chunk_size + 64) * m.info.vocab_size for m in self._state.models.values()), default=0
        )
        return min(most, max(LEAST_ARENA, rows * LOGIT.itemsize))

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise UsedAfterFork(
                f"this client was made in process {self._pid}; make a new Client in this one ({os.getpid()})"
            )
        if self._state.closed:
            raise ClientClosed("the client was closed; make another one")
        if self._channel.dead is not None:
            raise type(self._channel.dead)(str(self._channel.dead))

    def _make_session(self, opened: frames.SessionOpened, seed: int) -> Session:
        return Session(self, opened.session, self._state.models[opened.model], opened.engine, seed)

    def _forked(self) -> None:
        """In a forked child: its copy of the socket would hide this client's end from the daemon."""
        self._link.abandon()
        error = UsedAfterFork(f"this future belongs to a client of process {self._pid}; make a new Client in this one")
        for future in self._channel.outstanding_futures():
            future.fail_in_forked_child(error)


def _output_rows(value: object) -> OutputRows:
    try:
        return OutputRows(value)  # type: ignore[arg-type]
    except ValueError:
        raise InvalidRequest(f"output_rows is {value!r}; OutputRows.NONE, LAST or ALL is wanted") from None


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)

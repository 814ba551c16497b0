"""Sessions of a client, whether its caller waits or awaits: opening, forking, reopening and closing them."""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from shmsched import failpoints
from shmsched.arguments import flag, seconds, text, whole
from shmsched.client.collected import is_ours, say_dropped
from shmsched.client.core import BLOCK_TIMEOUT_S, checked_model, checked_options, checked_seed
from shmsched.client.flows import Flow, Until, after, left
from shmsched.client.generation.start import checked_wishes
from shmsched.client.models import Model
from shmsched.client.state import LAST_WORD_S, Answer, MakeSession, Opening
from shmsched.client.submission import checked_deadline
from shmsched.client.submitting import StepT, StreamT, Submitting
from shmsched.dataplane.session_core import SessionCore, closed_error
from shmsched.dataplane.submission import PendingResult
from shmsched.errors import Full, ProtocolError, SchedulerDied, Unsupported
from shmsched.params import GREEDY, OutputRows, SamplingParams
from shmsched.wire import frames

T = TypeVar("T")
SessionT = TypeVar("SessionT", bound=SessionCore)
OpenedT = TypeVar("OpenedT")
TextT = TypeVar("TextT")
Asked = Callable[[int], frames.OpenSession | frames.ForkSession]
"""The frame that asks for the session with this number."""


class SessionOpener(Submitting[StepT, StreamT], Generic[SessionT, StepT, StreamT, OpenedT, TextT]):
    """Opens sessions: whoever inherits runs the flows."""

    _session_type: Callable[..., SessionT]
    _next_session = 1

    # --- what differs ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def _drive(self, flow: Callable[..., Flow[T]], *arguments: Any) -> Any:
        """Run the flow with these arguments. Returns what it comes to, or what to await for that."""

    @abstractmethod
    def _open_by(self, flow: Callable[..., Flow[SessionT]], *arguments: Any) -> OpenedT:
        """The same for one that opens a session."""

    @abstractmethod
    def _text(self, prompt: str, where: dict[str, Any], how: dict[str, Any]) -> TextT:
        """What ``generate_text`` gives. ``where``: of the session; ``how``: of its generation."""

    @abstractmethod
    def _new_answer(self) -> Answer: ...

    @abstractmethod
    def _refuse_in_callback(self, what: str) -> None:
        """Raises Full where ``what`` would wait for the very thread that it is called in."""

    def _holds_up_others(self) -> bool:
        """Whether what another thread is to do for the client may wait for this very one."""
        return False

    @abstractmethod
    def _wake(self) -> None:
        """Have sessions closed that were collected. It takes no lock."""

    # --- opening --------------------------------------------------------------------------------------------------------

    def open_session(
        self,
        *,
        model: str | None = None,
        options: bytes = b"",
        seed: int | None = None,
        block: bool = True,
        timeout: float | None = None,
    ) -> OpenedT:
        """Open a session on the least loaded engine of ``model`` (None: the only one that is served). Of an ``AsyncClient``: ``await``
        it, make it a task, or enter it with ``async with``.

        options: bytes for the engine's ``open_session``, at most 65,536. seed: what sampling uses where a step names none;
        None draws one. Without a free slot this waits, up to ``timeout`` seconds, or raises Full with ``block=False``.
        Raises NoEngine, InvalidRequest, Unsupported or EngineError as the engine says, SessionLost where that ends meanwhile,
        SchedulerStopped, SchedulerDied.
        """
        self._check_here()
        return self._open_by(self._opening, model, options, seed, block, timeout)

    # Each notes in ``asked`` what it asks for: whoever drives it gives that up where it fails, or an interrupt comes.

    def _opening(
        self,
        asked: list[Opening],
        model: str | None,
        options: bytes,
        seed: int | None,
        block: bool,
        timeout: float | None,
    ) -> Flow[SessionT]:
        self._check_usable()
        self._refuse_in_callback("open a session")
        timeout, model, block = seconds("timeout", timeout), checked_model(model), flag("block", block)
        how = frames.Block.NO
        if block:
            how = frames.Block.WHILE_ENGINES_COME if timeout is None else frames.Block.UNTIL_GIVEN_UP
        what = f"model {model!r}" if model else "the daemon"

        def frame(number: int) -> frames.OpenSession:
            return frames.OpenSession(number, how, model or "", options)

        return (yield from self._asking(asked, frame, what, options, seed, timeout))

    def _asking(
        self,
        asked: list[Opening],
        frame: Asked,
        what: str,
        options: bytes,
        seed: int | None,
        timeout: float | None,
    ) -> Flow[SessionT]:
        opening = Opening(answer := self._new_answer(), checked_seed(seed), checked_options(options))
        asked.append(opening)
        # One of those may have the very slot that is wanted.
        self._state.close_dropped()
        self._channel.under_lock(self._ask, opening, frame)
        yield Until(answer, after(timeout))
        if not answer.done() and self._channel.under_lock(self._give_notice, opening):
            yield Until(answer, after(LAST_WORD_S))
            raise self._no_slot(what, timeout, answer.exception() if answer.done() else None)
        # Perhaps opened, or refused, in this very moment.
        session: SessionT = answer.result()
        return session

    def _ask(self, opening: Opening, frame: Asked) -> None:
        self._check_usable()
        number = self._next_session
        self._next_session = number + 1
        opening.number = number
        self._state.opening[number] = opening
        try:
            question = frame(number)
            self._channel.send(question)
            failpoints.hit(
                "client.fork.sent" if isinstance(question, frames.ForkSession) else "client.open_session.sent"
            )
        except SchedulerDied as e:
            self._state.opening.pop(number, None)
            raise self._state.end_of_stream() from e

    def _give_notice(self, opening: Opening) -> bool:
        """Ask for nothing any more, and for a last word: who has the slots. It comes to the answer that was asked for. False if
        that is there."""
        number = opening.number
        if number is None or number not in self._state.opening:
            return False
        if not opening.given_up:
            self._state.send_close(number)
            opening.given_up = True
        return True

    def _no_slot(self, what: str, timeout: float | None, said: BaseException | None) -> BaseException:
        """That nobody opened a session in time, or the better reason that the scheduler has ``said``."""
        if said is not None and not isinstance(said, Full):
            return said
        why = f": {said}" if said is not None and str(said) else ""
        if not self._state.models:
            why = "; no engine is up, and `shmsched status` says why"
        return Full(f"no session slot of {what} became free within {timeout or 0.0:g} s{why}")

    def _give_up(self, asked: list[Opening]) -> None:
        """Nobody will ever hold these sessions, whatever becomes of them."""
        for opening in asked:
            if opening.number is not None:
                self._channel.under_lock(self._give_up_number, opening.number)

    def _give_up_number(self, number: int) -> None:
        state = self._state
        if number not in state.opening and number not in state.sessions:
            return
        session = state.session(number)
        if session is not None:
            session.ended = closed_error(number)
        state.send_close(number)
        state.opening.pop(number, None)
        state.sessions.pop(number, None)

    def _session_maker(self) -> MakeSession:
        """Makes sessions for the client, and does not keep it alive."""
        reference = weakref.ref(self)

        def make_session(opened: frames.SessionOpened, asked: Opening) -> SessionCore | None:
            client = reference()
            if client is None:
                return None
            model = client._model_of(opened)
            return client._session_type(client, opened.session, model, opened.engine, asked.seed, asked.options)

        return make_session

    def _model_of(self, opened: frames.SessionOpened) -> Model:
        """The model of a session, as its own engine serves it. Raises ProtocolError."""
        model = self._state.models.get(opened.model)
        if model is None or len(opened.limits) < len(frames.SessionLimits._fields):
            raise ProtocolError(
                f"session {opened.session} of model {opened.model!r} is open, of which nothing was said"
            )
        return model.within(frames.SessionLimits(*opened.limits[: len(frames.SessionLimits._fields)]))

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
    ) -> TextT:
        """The text that ``model`` goes on with after ``prompt``, in increments at character boundaries, in a session of its own.

        The prompt gets the token for the beginning of a text in front. The text ends at the model's stop tokens, before a text of
        ``stop``, after ``max_new_tokens``, or when the session is full. Leaving the loop over it cancels the rest. deadline: as for
        ``Session.generate``; it holds for the wait for a slot too. Raises what ``open_session`` and ``Session.generate`` raise,
        Unsupported for a model without a tokenizer: InvalidRequest at the call, the others as its text begins.
        """
        self._check_here()
        self._check_usable()
        text("prompt", prompt)
        where = {"model": checked_model(model), "options": checked_options(options), "seed": checked_seed(seed)}
        how = {"max_new_tokens": max_new_tokens, "sampling": sampling, "deadline": deadline}
        if deadline is not None:
            checked_deadline(deadline)
        how["stop"] = checked_wishes(max_new_tokens, sampling, stop)[1]
        return self._text(prompt, where, how)

    # --- forking, reopening ---------------------------------------------------------------------------------------------

    def _forking(
        self,
        asked: list[Opening],
        parent: SessionT,
        upto: int | None,
        seed: int | None,
        block: bool,
        timeout: float | None,
    ) -> Flow[SessionT]:
        timeout, block = seconds("timeout", timeout), flag("block", block)
        length = self._fork_length(parent, upto)
        self._refuse_in_callback("fork a session")
        deadline = after(timeout)
        late = f"session {parent.session_id} cannot be forked: its steps have not run within {timeout or 0:g} s"
        for reply in self._channel.outstanding_of(parent):
            yield from self._done(reply, deadline, late)
        # One of them may have failed.
        length = self._fork_length(parent, length if upto is not None else None)
        history, stands = parent.history[:length], parent.stands_at(length)
        copied = False
        if parent.model.supports_fork:
            try:
                child = yield from self._asking(
                    asked,
                    lambda number: frames.ForkSession(number, parent.session_id, length),
                    "its engine",
                    parent.options,
                    seed,
                    left(deadline),
                )
                copied = True
            except (Full, Unsupported):
                if not block:
                    raise
        if copied:
            self._channel.under_lock(child.submitted, 0, 0, history.tobytes())
        else:
            child = yield from self._opening(asked, parent.model.name, parent.options, seed, block, left(deadline))
            if length:
                step: Any = self._submit(child, history, None, GREEDY, OutputRows.NONE, None, True, BLOCK_TIMEOUT_S)
                yield from self._done(step, deadline, late)
                step.result()
        self._channel.under_lock(child.rest, length, *stands)
        return child

    def _done(self, reply: PendingResult, deadline: float | None, late: str) -> Flow[None]:
        while not reply.done():
            if deadline is not None and time.monotonic() >= deadline:
                raise Full(late)
            yield Until(reply, deadline)

    def _fork_length(self, parent: SessionCore, upto: int | None) -> int:
        return self._channel.under_lock(self._length_to_fork, parent, upto)

    def _length_to_fork(self, parent: SessionCore, upto: int | None) -> int:
        self._check_usable()
        parent.check_free(None)
        length = parent.position if upto is None else upto
        return whole("upto", length, 0, parent.position, where=f"(what session {parent.session_id} holds), or None")

    def _reopening(self, asked: list[Opening], session: SessionT, timeout: float | None) -> Flow[None]:
        fresh = yield from self._opening(asked, session.model.name, session.options, session.seed, True, timeout)
        self._channel.under_lock(self._channel.decide, self._replaced, asked, session, fresh)

    def _replaced(self, asked: list[Opening], session: SessionCore, fresh: SessionCore) -> None:
        """``session``, which is lost, stands for ``fresh`` from now on."""
        asked.clear()
        number = fresh.session_id
        if session.session_id != number:
            session.become(fresh)
        if number in self._state.sessions:
            self._state.sessions[number] = weakref.ref(session)
        # Nobody has it but under the other name.
        fresh.ended = closed_error(number)

    # --- closing --------------------------------------------------------------------------------------------------------

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

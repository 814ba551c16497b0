"""Submitting, whether its caller waits or awaits: at the call where there is room; how room is waited for is what differs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Generic, TypeVar

from shmsched import failpoints
from shmsched.client.channel import to_be_sent
from shmsched.client.core import ClientCore
from shmsched.client.leases import ClientArena
from shmsched.client.replies import TokenStream
from shmsched.client.state import Answer
from shmsched.client.submission import submitted
from shmsched.dataplane.layouts import LOGIT_SIZE
from shmsched.dataplane.session_core import SessionCore
from shmsched.dataplane.submission import PendingResult, Submission
from shmsched.errors import InvalidRequest, SchedulerDied, ShmschedError
from shmsched.params import OutputRows, SamplingParams
from shmsched.steps import Tokens
from shmsched.wire import frames
from shmsched.wire.link import Outgoing

if TYPE_CHECKING:
    from shmsched.client.generation.course import Course

StepT = TypeVar("StepT", bound=PendingResult)
StreamT = TypeVar("StreamT", bound=TokenStream)
ReplyT = TypeVar("ReplyT", bound=PendingResult)

LEAST_ARENA = 64 << 20
ARENA = "the logits arena is being made"


class Submitting(ClientCore, Generic[StepT, StreamT]):
    """What sessions and generations of a client submit through."""

    _new_step: Callable[[], StepT]
    """Makes what stands for a step."""
    _line: Sized = ()
    """Those that wait for room, where nobody may go before them."""

    # --- what differs ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def _send(self, submission: Submission, reply: PendingResult, block: bool, timeout: float | None) -> None:
        """Submit it, or have it submitted once there is room and an arena. Raises why it never will be, and Full where waiting is not
        wanted."""

    @abstractmethod
    def _send_steps(self) -> bool:
        """Send what was submitted, or have it sent with what follows. The caller holds the lock. True."""

    @abstractmethod
    def _new_stream(self) -> StreamT: ...

    # --- submitting -----------------------------------------------------------------------------------------------------

    def _submit(
        self,
        session: SessionCore,
        tokens: Tokens,
        position: int | None,
        sampling: SamplingParams | None,
        output_rows: OutputRows,
        deadline: float | None,
        block: bool,
        timeout: float | None,
        course: Course | None = None,
    ) -> StepT:
        reply = self._new_step()
        try:
            submission = submitted(session, tokens, position, sampling, output_rows, deadline, course)
            self._send(submission, reply, block, timeout)
            return reply
        except BaseException as e:
            self._not_submitted(reply, e)
            raise

    def _put(self, submission: Submission, reply: ReplyT, block: bool, timeout: float | None) -> ReplyT:
        try:
            self._send(submission, reply, block, timeout)
            return reply
        except BaseException as e:
            self._not_submitted(reply, e)
            raise

    def _put_stream(self, submission: Submission, block: bool, timeout: float | None) -> StreamT:
        return self._put(submission, self._new_stream(), block, timeout)

    def _try(self, submission: Submission, reply: PendingResult, tell: Callable[[], None] | None) -> str | None:
        """Submit it if there is room, placed and checked by what is true now. Returns what is lacking; where that is not ARENA,
        ``tell`` is called once it may have changed."""
        channel = self._channel
        try:
            with channel.lock:
                lacking = channel.enter(submission, reply)
                if lacking:
                    if tell is not None and tell not in channel.wait_for_room:
                        channel.wait_for_room.append(tell)
                    return lacking
                if lacking is not None:
                    return ARENA
                self._send_steps()
                return None
        except BaseException:
            channel.interrupted()
            raise

    def _not_submitted(self, reply: PendingResult, error: BaseException) -> None:
        """Submitting it has raised. Where that was an interrupt, nobody has the reply: it is taken back."""
        self._channel.interrupted()
        if not isinstance(error, ShmschedError):
            self._channel.take_back(reply)

    # --- the arena ------------------------------------------------------------------------------------------------------

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
            self._channel.send_once(frame)
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

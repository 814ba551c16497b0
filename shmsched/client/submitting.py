"""Submitting as a synchronous client does: the caller waits for room, for the arena, and for nothing else."""

from __future__ import annotations

import time
from typing import TypeVar, cast

from shmsched.arguments import flag, seconds
from shmsched.client.core import ClientCore
from shmsched.client.receiver import Receiver
from shmsched.client.replies import Reply
from shmsched.client.submission import Submission
from shmsched.errors import Full, SchedulerDied, ShmschedError
from shmsched.futures import LightFuture
from shmsched.locks import Bell
from shmsched.memory.segment import Segment

ReplyT = TypeVar("ReplyT", bound=Reply)


class Submitting(ClientCore):
    """What sessions and generations of a synchronous client submit through."""

    _receiver: Receiver

    def _send(self, submission: Submission, reply: ReplyT, block: bool, timeout: float | None) -> ReplyT:
        """Submit, once there is room. Waiting gives up the lock: so it is placed and checked again after each wait, by what is
        true then."""
        deadline, channel, block, timeout = None, self._channel, flag("block", block), seconds("block_timeout", timeout)
        while True:
            with channel.lock:
                lacking = channel.place(submission)
                if lacking is None and (channel.arena is not None or not submission.raw_rows):
                    channel.submit(submission, reply)
                    self._send_steps()
                    return reply
                room_came = None if lacking is None else self._ask_for_room(lacking, block)
            if room_came is None:
                self._ensure_arena()
                continue
            if deadline is None and timeout is not None:
                deadline = time.monotonic() + timeout
            if not room_came.wait(None if deadline is None else deadline - time.monotonic()):
                raise Full(f"{lacking}, and waiting {timeout:g} s did not change that")

    def _not_submitted(self, reply: Reply, error: BaseException) -> None:
        """Submitting it has raised. Where that was an interrupt, nobody has the reply: it is taken back."""
        self._channel.interrupted()
        if not isinstance(error, ShmschedError):
            self._channel.take_back(reply)

    def _send_steps(self) -> bool:
        """Send what was submitted, if it is not better sent together with what follows. The caller holds the lock. True."""
        outbox = self._channel.outbox
        if self._receiver.expects_more() and not outbox.full:
            return True
        try:
            outbox.send_steps()
        except SchedulerDied as e:
            # The scheduler may have said why before it went; that is not read yet.
            raise self._state.end_of_stream() from e
        return True

    def _ask_for_room(self, lacking: str, block: bool) -> Bell:
        """What is rung when some room has come back; whatever the caller knows may have changed then. The caller holds the lock.

        Raises Full where waiting is not wanted, or would be for ever.
        """
        if not block:
            raise Full(f"{lacking}; submit with block=True to wait")
        self._receiver.refuse_in_callback(f"wait for room ({lacking})")
        bell = Bell()
        self._channel.wait_for_room.append(bell.ring)
        return bell

    def _ensure_arena(self) -> None:
        """Have an arena. Raises SharedMemoryError with the sizes."""
        self._receiver.refuse_in_callback("wait for the logits arena; make the first raw step elsewhere")
        answer = self._channel.under_lock(self._ask_for_arena, LightFuture())
        self._receiver.wait_for(cast("LightFuture[Segment]", answer), None)
        self._channel.under_lock(self._arena_came, answer)

"""One attached engine: its queues, its sessions, and the batch that it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from shmsched import failpoints
from shmsched.daemon.batch_in_flight import BatchInFlight
from shmsched.daemon.batch_slot import Answers
from shmsched.daemon.batches_in_hand import BATCH_SLOTS, BatchesInHand
from shmsched.daemon.clock import Clock
from shmsched.daemon.engine_arenas import EngineArenas
from shmsched.daemon.engine_record import EngineRecord
from shmsched.daemon.foresight import LONG_STEP_S, Foresight
from shmsched.daemon.linger import Linger
from shmsched.daemon.loop import Timer, contained
from shmsched.daemon.session_slots import SessionSlots
from shmsched.daemon.state import Session, Step
from shmsched.daemon.watchdog import Watchdog
from shmsched.dataplane.layouts import BatchSlotLayout, StepStatus
from shmsched.dataplane.queues import StepQueues
from shmsched.dataplane.step import StepState
from shmsched.errors import ErrorCode
from shmsched.memory.segment import Segment
from shmsched.saying import say_trace
from shmsched.scheduling import SchedulerParams
from shmsched.wire import frames
from shmsched.wire.peer import Peer

if TYPE_CHECKING:
    from shmsched.daemon.client_link import ClientLink
    from shmsched.daemon.server import Daemon

# Plain numbers: to compare one with a member of an enum takes several times as long.
DONE, DEFERRED = int(StepStatus.DONE), int(StepStatus.DEFERRED)
NO_ARENA, SPOILT = int(StepStatus.NO_ARENA), int(StepStatus.SPOILT)


class EngineState(Enum):
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


READY, ANYWHERE = EngineState.READY, frames.Rewinds.ANYWHERE


class EngineLink:
    """The scheduler's side of one incarnation of an engine. ``number`` is never used again, not even by its successor."""

    def __init__(
        self, number: int, peer: Peer, offer: frames.Offer, limits: SchedulerParams,
        linger_share: float, ahead_share: float, clock: Clock,
    ) -> None:  # fmt: skip
        """``linger_share``, ``ahead_share``: as in DaemonConfig."""
        self.number = number
        self.peer = peer
        self.offer = offer
        self.limits = limits
        self.rewinds = frames.Rewinds.of(offer.rewinds)
        self.state = EngineState.STARTING
        self._clock = clock
        self.since = clock.now()
        self.queues = StepQueues(limits.max_decode_sequences, limits.max_batch_size, exclusive_sessions=True)
        self.linger = Linger(linger_share)
        self.linger_timer: Timer | None = None
        self._foresight = Foresight(ahead_share)
        self.watchdog = Watchdog(self)
        self.hang_up: Callable[[], None] = lambda: None  # ends the engine's connection, and with it the engine
        self.blame: Callable[[Exception], None] = say_trace
        """Ends the engine's connection at the end of this turn, for a fault of ours in what is done for it alone."""
        self.read: Callable[[], None] = lambda: None  # handles what the engine has sent by now
        self.read_and_hang_up: Callable[[str], None] = lambda why: None  # for one whose process is dead: both
        self.ended: Callable[[str], None] = lambda why: None  # waits to be told how the engine's process ended
        self.pidfd = -1
        """Of its process, where that is not a child of the daemon."""
        self.record = EngineRecord()
        self.stale_answers = 0
        # An opening may wait in each slot while the engine runs a batch.
        peer.max_outbound += offer.max_sessions * (frames.MAX_OPTIONS + 64)
        size = BatchSlotLayout(limits.max_batch_size).size
        self.segment = Segment.create(BATCH_SLOTS * size, f"engine {offer.spec}")
        self.in_hand = BatchesInHand(memoryview(self.segment.buffer), limits, offer.vocab_size)
        self._slots = SessionSlots(offer.max_sessions, clock)
        self.heard_at = 0.0
        """When it last said something that it owed. What else it says does not make it any less stuck."""
        self._arenas = EngineArenas(peer)
        self._buried = False

    # --- sessions -------------------------------------------------------------------------------------------------------

    @property
    def sessions(self) -> dict[int, Session]:
        """By slot."""
        return self._slots.sessions

    @property
    def holders(self) -> dict[ClientLink, int]:
        """How many of its slots each client has."""
        return self._slots.holders

    @property
    def has_slot(self) -> bool:
        return self.state is READY and self._slots.has_room

    def open(self, session: Session) -> None:
        """Give the session a slot and have the engine open it."""
        session.engine = self
        self.peer.send(frames.OpenSlot(self._slots.take(session), session.number, session.options))

    def fork(self, session: Session, parent: Session) -> None:
        """Give the session a slot and have the engine open it with what ``parent`` holds."""
        session.engine, slot = self, self._slots.take(session)
        self.peer.send(frames.ForkSlot(slot, session.number, parent.slot, session.next_position))

    def close(self, session: Session, *, refused: bool = False) -> None:
        """The session is over. ``refused``: the engine would not open it."""
        if self.sessions.get(session.slot) is not session:
            return
        self._slots.give_back(session, refused)
        self.linger.forget(session.number)
        if self.state is not EngineState.DEAD and not refused:
            self.peer.send(frames.CloseSlot(session.slot))

    def opening_answered(self, slot: int, number: int) -> Session | None:
        """The engine has opened, or refused, what was asked for. None if that session has ended meanwhile."""
        session, was_owed = self._slots.answered(slot, number)
        if was_owed:
            self.heard_at = self._clock.now()
        return session

    def forget_client(self, client: ClientLink) -> None:
        """No later batch names the client. The frame reaches the engine after the last one that does."""
        if self._arenas.forget(client) and self.state is not EngineState.DEAD:
            self.peer.send(frames.DetachArena(client.number))

    # --- batches --------------------------------------------------------------------------------------------------------

    @property
    def batch(self) -> BatchInFlight | None:
        """What it runs."""
        return self.in_hand.running

    @property
    def has_its_next(self) -> bool:
        """For some time to come it needs nothing of the scheduler."""
        return self.in_hand.following is not None and self.linger.mean_step_s > LONG_STEP_S

    def may_go(self, now: float) -> bool:
        """The engine is free, work is queued, and nobody is worth waiting for any longer."""
        queues = self.queues
        if self.batch is not None or self.state is not READY or not queues.queued:
            return False
        return now >= self.linger.deadline() or queues.ready_decodes >= self.limits.max_decode_sequences

    def dispatch(self, daemon: Daemon, now: float) -> None:
        """Form a batch and hand it to the engine."""
        self.linger.gave_up()
        if self.linger_timer is not None:
            # It would wake the loop while the batch runs, to find nothing to do.
            self.linger_timer.cancel()
            self.linger_timer = None
        # Steps that cannot be given stay queued, where the end of the engine finds them.
        batch = self.queues.hand_over(partial(self.in_hand.give, now))
        if batch is None:
            return
        daemon.settling.ledger.dispatch(batch.steps)
        if not batch.plain:
            self._arenas.give(batch.steps)
        self.peer.send(frames.Work(batch.number, batch.number % BATCH_SLOTS))
        failpoints.hit("daemon.work.half_sent", self.peer.flush_half)

    def look_ahead(self, daemon: Daemon, now: float) -> bool:
        """Have the engine go on with the next tokens of the generations in its batch, without a pause, where it would do so anyway:
        nothing else is queued for it, and no session is expected back that would rather be in the same batch.

        What comes after that waits for one batch of decodes more: so it is done late, where a step is long. A generation that turns
        out to have ended has taken one token too many in the engine, which is rewound if the session goes on. Whether it was done.
        """
        batch, in_hand = self.in_hand.running, self.in_hand
        if (
            batch is None
            # Else a client may come back with its next step.
            or not batch.generates
            or in_hand.following is not None
            or self.state is not READY
            or self.queues.queued
            or self.linger.expected
            or self.rewinds is not ANYWHERE
        ):
            return False
        if not self._foresight.is_due(self, batch.started, now, daemon):
            return False
        number = in_hand.give_ahead(batch)
        if number is not None:
            self.peer.send(frames.Follow(number, number % BATCH_SLOTS, number - 1))
        return number is not None

    def _go_on(self, followers: Sequence[Step | None], daemon: Daemon, *, ran: bool = True) -> None:
        """The batch has ended, and these come after each of its steps: the engine has gone on with them, or they are queued.

        ``ran``: not where the engine skips what was to follow.
        """
        following, now = self.in_hand.following, self.heard_at
        begun: Sequence[Step | None] = followers if ran else ()
        queued = followers if following is None or not ran else ()
        if following is not None:
            if ran and following.deadline <= now:
                # Who was not dispatched by its deadline is queued, where that is found out.
                queued = [step for step in followers if step is not None and 0.0 < step.wanted.deadline <= now]
                begun = [None if step in queued else step for step in followers]
            daemon.settling.ledger.dispatch(self.in_hand.go_on(begun, now))
        daemon.queue_all(self, [step for step in queued if step is not None], now)

    @property
    def silent_since(self) -> float | None:
        """Since when the engine owes an answer and has said nothing: a batch's, or an opening's. None if it owes none."""
        if self.state is not EngineState.READY or (self.batch is None and not self._slots.openings):
            return None
        asked = self.batch.started if self.batch is not None else min(self._slots.openings.values())
        return max(asked, self.heard_at)

    @property
    def opening(self) -> list[Session]:
        """The sessions whose opening the engine has not answered."""
        return [self.sessions[slot] for slot in self._slots.openings if slot in self.sessions]

    def done(self, message: frames.Done, daemon: Daemon) -> None:
        """Settle a batch by its results. An answer for another batch than the one in flight is counted and ignored."""
        batch = self._end_batch(message.batch)
        if batch is None:
            return
        try:
            answers, all_done = self.in_hand.read(batch, message.messages)
        except ValueError as e:
            self._lose_batch(
                batch, f"engine {self.offer.spec} ({self.peer.name}) gave results that do not fit: {e}", daemon
            )
            return
        try:
            if not all_done or not self._all_done(batch, answers, daemon):
                self._each_done(batch, answers, all_done, daemon)
        except Exception:
            # The engine ends now, which settles what is left of the batch.
            self.in_hand.put_back(batch)
            raise

    def _all_done(self, batch: BatchInFlight, answers: Answers, daemon: Daemon) -> bool:
        """Settle a batch of which each step was answered. False, and nothing happens, if one was settled before."""
        steps, settling, ids, logprobs = batch.steps, daemon.settling, answers.ids, answers.logprobs
        followers: list[Step | None] | None = None
        if not batch.plain:
            followers = settling.complete(steps, batch.started, ids, logprobs, daemon)
            if followers is None:
                return False
        elif not settling.complete_plain(steps, batch.started, ids, logprobs):
            return False
        self._finish(batch, (s.session.number for s in steps if s.wanted.n_rows and not s.session.outstanding))
        if followers is not None:
            self._go_on(followers, daemon)
        return True

    def _each_done(self, batch: BatchInFlight, answers: Answers, all_done: bool, daemon: Daemon) -> None:
        """Settle a batch step by step. ``all_done``: each that the engine was given was answered."""
        at, messages = 0, iter(answers.messages)
        came: list[int] = []
        deferred: list[Step] = []
        followers: list[Step | None] = []
        for step, status in zip(batch.steps, answers.statuses, strict=True):
            follower = None
            if status == DONE:
                completed = daemon.settling.complete([step], batch.started, answers.ids, answers.logprobs, daemon, at)
                if completed is not None:
                    (follower,) = completed
                    # One with more steps queued is back already.
                    if step.wanted.n_rows and not step.session.outstanding:
                        came.append(step.session.number)
                else:
                    daemon.settling.ledger.ignore()
                    step.session.client.return_rows(step)
            elif status == DEFERRED:
                deferred.append(step)
            elif status == NO_ARENA:
                self._has_no_arena(step, next(messages), daemon)
            else:
                self._fail_step(step, message := next(messages), daemon)
                if status == SPOILT:
                    daemon.sessions.spoilt(step, message)
            followers.append(follower)
            at += step.wanted.n_results
        self._finish(batch, came)
        self._go_on(followers, daemon, ran=all_done)
        self._requeue(deferred, len(deferred) == batch.size, daemon)

    def skipped(self, message: frames.Skipped, daemon: Daemon) -> None:
        """The engine has not run what was to follow a batch, because not all of that was done."""
        batch = self._end_batch(message.batch)
        if batch is not None:
            self._go_on((), daemon, ran=False)
            self._requeue(batch.steps, False, daemon)

    def batch_failed(self, message: frames.BatchFailed, daemon: Daemon) -> None:
        """The engine raised: the batch's steps fail and its sessions are lost."""
        batch = self._end_batch(message.batch)
        if batch is not None:
            self._lose_batch(batch, f"engine {self.offer.spec} ({self.peer.name}) raised {message.message}", daemon)

    def _end_batch(self, number: int) -> BatchInFlight | None:
        if (batch := self.in_hand.take_back(number)) is None:
            self.stale_answers += 1
        else:
            self.heard_at = self._clock.now()
        return batch

    def _finish(self, batch: BatchInFlight, came: Iterable[int]) -> None:
        """``came``: the sessions that got a token and have nothing queued."""
        now = self.heard_at
        seconds = now - batch.started
        self._foresight.batch_ended(seconds)
        n_tokens = self.record.add(batch, seconds)
        # Of what was given ahead some may not count any more, and was run all the same.
        self.linger.batch_ended(now, seconds, max(n_tokens, batch.size), came, self.queues.queued_chunks > 0)

    def _fail_step(self, step: Step, message: str, daemon: Daemon, code: ErrorCode = ErrorCode.STEP_FAILED) -> None:
        if step.state is StepState.IN_FLIGHT:
            session = step.session
            words = f"engine {self.offer.spec} failed the step at position {step.position} of session {session.client_id}: {message}"
            daemon.settling.fail_from(session, step.number, step.position, code, words)
        step.session.client.return_rows(step)

    def _has_no_arena(self, step: Step, message: str, daemon: Daemon) -> None:
        """The step's rows lie where the engine cannot write."""
        why = self._arenas.lacks(step.session.client, message)
        self._fail_step(step, why, daemon, ErrorCode.SHARED_MEMORY_LIMIT)

    def _requeue(self, deferred: list[Step], nothing_ran: bool, daemon: Daemon) -> None:
        """Deferred steps go back to the front, the last one first, so that they keep their order."""
        requeued = 0
        for step in reversed(deferred):
            if daemon.settling.ledger.requeue(step):
                self.queues.push_front(step)
                if step.deadline:
                    daemon.deadlines.add(step)
                requeued += 1
            else:
                step.session.client.return_rows(step)
        if requeued and nothing_ran and self.sessions:
            # Nothing ran, so nothing will make room by itself: without this the same batch would go round for ever.
            youngest = max(self.sessions.values(), key=lambda s: s.number)
            daemon.sessions.end(
                youngest,
                ErrorCode.SESSION_LOST,
                f"engine {self.offer.spec} deferred everything; session {youngest.client_id}, the youngest, made room",
            )

    def _lose_batch(self, batch: BatchInFlight, message: str, daemon: Daemon) -> None:
        self._finish(batch, [])
        sessions = {session.number: session for session in batch.sessions}
        for step in batch.steps:
            if step.state is StepState.IN_FLIGHT:
                daemon.settling.fail_from(step.session, step.number, step.position, ErrorCode.ENGINE_ERROR, message)
            step.session.client.return_rows(step)
        for session in sessions.values():
            daemon.sessions.end(session, ErrorCode.SESSION_LOST, f"session {session.client_id} is lost: {message}")
        self._go_on((), daemon, ran=False)

    # --- death ----------------------------------------------------------------------------------------------------------

    def abandon(self, code: ErrorCode, message: str, daemon: Daemon) -> None:
        """The engine is as good as dead: settle everything it held. Rows in flight stay held until ``buried``."""
        self.state = EngineState.DEAD
        for step in self.batch.steps if self.batch is not None else ():
            if step.state is StepState.IN_FLIGHT:
                daemon.settling.fail_from(step.session, step.number, step.position, code, message)
        for session in list(self.sessions.values()):
            with contained():
                daemon.sessions.end(session, ErrorCode.SESSION_LOST, f"session {session.client_id} is lost: {message}")
        if self.linger_timer is not None:
            self.linger_timer.cancel()
        self._foresight.end()
        self.watchdog.end()
        # The turns that ended sessions keep in them refer to sessions, and those to this link.
        self.queues.clear()

    def buried(self) -> None:
        """Its process has ended: nobody writes into its rows. Idempotent: that, and the end of its connection, both say so."""
        if self._buried:
            return
        self._buried = True
        batch = self.in_hand.clear()
        for step in batch.steps if batch is not None else ():
            step.session.client.return_rows(step)
        self._arenas.clear()
        self.segment.close_descriptor()
        # Whatever still refers to this link (a step whose deadline is far, say) must not keep the memory mapped.
        del self.segment

"""One attached engine: its queues, its slots, and the batch that it runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from shmsched.daemon.batch_in_flight import BatchInFlight, BatchSummary
from shmsched.daemon.batch_slot import BatchSlot
from shmsched.daemon.linger import Linger
from shmsched.daemon.loop import Timer
from shmsched.daemon.state import Session, SessionState, Step
from shmsched.errors import ErrorCode
from shmsched.memory.layouts import BatchSlotLayout, StepStatus
from shmsched.memory.segment import Segment
from shmsched.scheduling import SchedulerParams, StepQueues, StepState
from shmsched.wire import frames
from shmsched.wire.peer import Peer

if TYPE_CHECKING:
    from shmsched.daemon.client_link import ClientLink
    from shmsched.daemon.server import Daemon

RECENT_BATCHES = 256
WARNING_SHARE = 0.5
"""Of the step time-out: after that much of it a silent engine is named in the log."""
# Plain numbers: to compare one with a member of an enum takes several times as long.
DONE, DEFERRED, FAILED = int(StepStatus.DONE), int(StepStatus.DEFERRED), int(StepStatus.FAILED)


class EngineState(Enum):
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


READY = EngineState.READY


class EngineLink:
    """The scheduler's side of one incarnation of an engine. ``number`` is never used again, not even by its successor."""

    def __init__(
        self, number: int, peer: Peer, offer: frames.Offer, limits: SchedulerParams, linger_share: float
    ) -> None:
        self.number = number
        self.peer = peer
        self.offer = offer
        self.limits = limits
        self.state = EngineState.STARTING
        self.since = time.monotonic()
        self.queues: StepQueues[Step] = StepQueues(limits, exclusive_sessions=True)
        self.sessions: dict[int, Session] = {}
        self.batch: BatchInFlight | None = None
        self.linger = Linger(linger_share)
        self.linger_timer: Timer | None = None
        self._watchdog: Timer | None = None
        self.hang_up: Callable[[], None] = lambda: None
        """Ends the engine's connection, and with it the engine."""
        self.read: Callable[[], None] = lambda: None
        """Handles what the engine has sent by now."""
        self.read_and_hang_up: Callable[[str], None] = lambda why: None
        """The same for an engine whose process is dead, after reading what it had still sent."""
        self.pidfd = -1
        """Of its process, where that is not a child of the daemon."""
        self.batches = 0
        self.steps_run = 0
        self.tokens_run = 0
        self.busy_s = 0.0
        self.stale_answers = 0
        self.recent: deque[BatchSummary] = deque(maxlen=RECENT_BATCHES)
        # An opening may wait in each slot while the engine runs a batch.
        peer.max_outbound += offer.max_sessions * (frames.MAX_OPTIONS + 64)
        self.segment = Segment.create(BatchSlotLayout(limits.max_batch_size).size, f"engine {offer.spec}")
        self._slot = BatchSlot(memoryview(self.segment.buffer), limits, offer.vocab_size)
        self._freed_slots: list[int] = []
        self._next_slot = 0
        """Slots from here on were never used; those before it are in use, or freed."""
        self.heard_at = 0.0
        """When it last said something that it owed. What else it says does not make it any less stuck."""
        self._openings: dict[int, float] = {}
        """Slots whose opening the engine has not answered, and when it was asked."""
        self._closed_early: dict[int, int] = {}
        """Slots whose session ended before the engine had answered its opening, with that session's number."""
        self._arenas: set[ClientLink] = set()
        self._buried = False

    # --- sessions -------------------------------------------------------------------------------------------------------

    @property
    def has_slot(self) -> bool:
        return self.state is READY and bool(self._freed_slots or self._next_slot < self.offer.max_sessions)

    def open(self, session: Session) -> None:
        """Give the session a slot and have the engine open it."""
        self.peer.send(frames.OpenSlot(self._take_slot(session), session.number, session.options))

    def fork(self, session: Session, parent: Session) -> None:
        """Give the session a slot and have the engine open it with what ``parent`` holds."""
        frame = frames.ForkSlot(self._take_slot(session), session.number, parent.slot, session.next_position)
        self.peer.send(frame)

    def _take_slot(self, session: Session) -> int:
        session.engine = self
        if self._freed_slots:
            session.slot = heappop(self._freed_slots)
        else:
            session.slot, self._next_slot = self._next_slot, self._next_slot + 1
        session.state = SessionState.OPENING
        self.sessions[session.slot] = session
        self._openings[session.slot] = time.monotonic()
        return session.slot

    def close(self, session: Session, *, refused: bool = False) -> None:
        """The session is over. Its slot is free at once: what the engine gets for it next comes after this frame.

        Only where the engine has not answered its opening yet, the slot waits for that answer. Else a client that opens
        and closes in a loop would pile up frames for an engine that is busy.
        """
        if self.sessions.get(session.slot) is not session:
            return
        del self.sessions[session.slot]
        self.linger.forget(session.number)
        if self.state is EngineState.DEAD:
            return
        if not refused:
            self.peer.send(frames.CloseSlot(session.slot))
        if session.state is SessionState.OPENING and not refused:
            self._closed_early[session.slot] = session.number
        else:
            heappush(self._freed_slots, session.slot)

    def opening_answered(self, slot: int, number: int) -> Session | None:
        """The engine has opened, or refused, what was asked for. None if that session has ended meanwhile."""
        session = self.sessions.get(slot)
        asked = session.number if session is not None else self._closed_early.get(slot)
        if number == asked and self._openings.pop(slot, None) is not None:
            self.heard_at = time.monotonic()
        if self._closed_early.get(slot) == number:
            del self._closed_early[slot]
            heappush(self._freed_slots, slot)
            return None
        if session is None or session.number != number or session.state is not SessionState.OPENING:
            return None
        return session

    def forget_client(self, client: ClientLink) -> None:
        """No later batch names the client. The frame reaches the engine after the last one that does."""
        if client in self._arenas:
            self._arenas.discard(client)
            if self.state is not EngineState.DEAD:
                self.peer.send(frames.DetachArena(client.number))

    # --- batches --------------------------------------------------------------------------------------------------------

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
        steps = self.queues.take()
        if not steps:
            return
        self.batches += 1
        self.batch = batch = BatchInFlight(self.batches, steps, now)
        if not batch.plain:
            self._attach_arenas(steps)
        daemon.settling.ledger.dispatch(steps)
        batch.lengths = self._slot.write(batch.number, steps)
        self.peer.send(frames.Work(batch.number, 0))

    def _attach_arenas(self, steps: list[Step]) -> None:
        """The engine gets the arena of each client that a step wants raw logits for, before the first batch that names it."""
        for step in steps:
            client = step.session.client
            if step.raw_rows and client not in self._arenas and client.arena is not None:
                self._arenas.add(client)
                self.peer.send(frames.AttachArena(client.number, client.arena.size), client.arena.fd)

    @property
    def silent_since(self) -> float | None:
        """Since when the engine owes an answer and has said nothing: a batch's, or an opening's. None if it owes none."""
        if self.state is not EngineState.READY or (self.batch is None and not self._openings):
            return None
        asked = self.batch.started if self.batch is not None else min(self._openings.values())
        return max(asked, self.heard_at)

    @property
    def opening(self) -> list[Session]:
        """The sessions whose opening the engine has not answered."""
        return [self.sessions[slot] for slot in self._openings if slot in self.sessions]

    def watch(self, daemon: Daemon) -> None:
        """Have a timer for what the engine owes. One for all, set again when it fires: one for each would pile up."""
        if self._watchdog is None:
            self._look(daemon)

    def _look(self, daemon: Daemon) -> None:
        self._watchdog = None
        since = self.silent_since
        if since is None:
            return
        limit, now = daemon.config.step_timeout_s, time.monotonic()
        if since + limit <= now:
            daemon.engines.hangs(self)
            return
        due = since + limit * WARNING_SHARE
        if due <= now:
            daemon.engines.is_silent(self, since)
            due = since + limit
        self._watchdog = daemon.loop.call_at(due, lambda: self._look(daemon))

    def done(self, message: frames.Done, daemon: Daemon) -> None:
        """Settle a batch by its results. An answer for another batch than the one in flight is counted and ignored."""
        batch = self._end_batch(message.batch)
        if batch is None:
            return
        steps = batch.steps
        try:
            statuses, ids, logprobs = self._slot.read(steps, batch.plain)
            failed = statuses.count(FAILED)
            if len(message.messages) != failed:
                raise ValueError(f"{len(message.messages)} messages came for {failed} failed steps")
        except ValueError as e:
            self._lose_batch(
                batch, f"engine {self.offer.spec} (pid {self.peer.pid}) gave results that do not fit: {e}", daemon
            )
            return
        if statuses.count(DONE) == len(steps) and self._all_done(batch, ids, logprobs, daemon):
            return
        messages = iter(message.messages)
        at = 0
        came: list[int] = []
        deferred: list[Step] = []
        for step, status in zip(steps, statuses, strict=True):
            if status == DONE:
                followers = daemon.settling.complete([step], batch.started, ids, logprobs, daemon, at)
                if followers is not None:
                    daemon.queue_all(self, followers, self.heard_at)
                    # One with more steps queued is back already.
                    if step.wanted.n_rows and not step.session.outstanding:
                        came.append(step.session.number)
                else:
                    daemon.settling.ledger.ignore()
                    step.session.client.return_rows(step)
            elif status == DEFERRED:
                deferred.append(step)
            else:
                self._fail_step(step, next(messages), daemon)
            at += step.wanted.n_results
        self._finish(batch, came)
        self._requeue(deferred, len(steps), daemon)

    def _all_done(self, batch: BatchInFlight, ids: list[int], logprobs: list[float], daemon: Daemon) -> bool:
        """Settle a batch of which each step was answered. False, and nothing happens, if one was settled before."""
        steps, settling = batch.steps, daemon.settling
        if batch.plain:
            if not settling.complete_plain(steps, batch.started, ids, logprobs):
                return False
        else:
            followers = settling.complete(steps, batch.started, ids, logprobs, daemon)
            if followers is None:
                return False
            daemon.queue_all(self, followers, self.heard_at)
        came = (s.session.number for s in steps if s.wanted.n_rows and not s.session.outstanding)
        self._finish(batch, came)
        return True

    def batch_failed(self, message: frames.BatchFailed, daemon: Daemon) -> None:
        """The engine raised: the batch's steps fail and its sessions are lost."""
        batch = self._end_batch(message.batch)
        if batch is not None:
            self._lose_batch(batch, f"engine {self.offer.spec} (pid {self.peer.pid}) raised {message.message}", daemon)

    def _end_batch(self, number: int) -> BatchInFlight | None:
        batch = self.batch
        if batch is None or batch.number != number:
            self.stale_answers += 1
            return None
        self.heard_at = time.monotonic()
        self.batch = None
        return batch

    def _finish(self, batch: BatchInFlight, came: Iterable[int]) -> None:
        """``came``: the sessions that got a token and have nothing queued."""
        now = self.heard_at
        seconds = now - batch.started
        lengths = batch.lengths
        n_steps, n_tokens, decodes = len(lengths), sum(lengths), lengths.count(1)
        self.steps_run += n_steps
        self.tokens_run += n_tokens
        self.busy_s += seconds
        self.recent.append(BatchSummary(batch.number, decodes, n_steps - decodes, n_tokens, seconds, time.time()))
        self.linger.batch_ended(now, seconds, came)

    def _fail_step(self, step: Step, message: str, daemon: Daemon) -> None:
        if step.state is StepState.IN_FLIGHT:
            session = step.session
            words = f"engine {self.offer.spec} failed the step at position {step.position} of session {session.client_id}: {message}"
            daemon.settling.fail_from(session, step.number, step.position, ErrorCode.STEP_FAILED, words)
        step.session.client.return_rows(step)

    def _requeue(self, deferred: list[Step], of: int, daemon: Daemon) -> None:
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
        if requeued and len(deferred) == of and self.sessions:
            # Nothing ran, so nothing will make room by itself: without this the same batch would go round for ever.
            youngest = max(self.sessions.values(), key=lambda s: s.number)
            daemon.sessions.end(
                youngest,
                ErrorCode.SESSION_LOST,
                f"engine {self.offer.spec} deferred everything; session {youngest.client_id}, the youngest, made room",
            )

    def _lose_batch(self, batch: BatchInFlight, message: str, daemon: Daemon) -> None:
        self._finish(batch, [])
        sessions = {step.session.number: step.session for step in batch.steps}
        for step in batch.steps:
            if step.state is StepState.IN_FLIGHT:
                daemon.settling.fail_from(step.session, step.number, step.position, ErrorCode.ENGINE_ERROR, message)
            step.session.client.return_rows(step)
        for session in sessions.values():
            daemon.sessions.end(session, ErrorCode.SESSION_LOST, f"session {session.client_id} is lost: {message}")

    # --- death ----------------------------------------------------------------------------------------------------------

    def abandon(self, code: ErrorCode, message: str, daemon: Daemon) -> None:
        """The engine is as good as dead: settle everything it held. Rows in flight stay held until ``buried``."""
        self.state = EngineState.DEAD
        if self.batch is not None:
            for step in self.batch.steps:
                if step.state is StepState.IN_FLIGHT:
                    daemon.settling.fail_from(step.session, step.number, step.position, code, message)
        for session in list(self.sessions.values()):
            daemon.sessions.end(session, ErrorCode.SESSION_LOST, f"session {session.client_id} is lost: {message}")
        for timer in (self.linger_timer, self._watchdog):
            # One that is still to come would keep the engine, and its memory mapped, until then.
            if timer is not None:
                timer.cancel()
        # The turns that ended sessions keep in them refer to sessions, and those to this link.
        self.queues = StepQueues(self.limits, exclusive_sessions=True)

    def buried(self) -> None:
        """The engine's process has ended: nobody writes into the rows of its last batch any more. Idempotent: that its
        connection is gone may be seen only once its process is, and each of the two says so."""
        if self._buried:
            return
        self._buried = True
        batch, self.batch = self.batch, None
        for step in batch.steps if batch is not None else ():
            step.session.client.return_rows(step)
        self._arenas.clear()
        self.segment.close_descriptor()
        # Whatever still refers to this link (a step whose deadline is far, say) must not keep the memory mapped.
        del self.segment, self._slot

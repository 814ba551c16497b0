"""One attached engine: its queues, its sessions, and the batches that it has been given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial

from shmsched import failpoints
from shmsched.daemon.client_link import ClientLink
from shmsched.daemon.config import DaemonConfig
from shmsched.daemon.connections import Connection
from shmsched.daemon.engine_arenas import EngineArenas
from shmsched.daemon.engine_record import EngineRecord
from shmsched.daemon.linger import Linger
from shmsched.daemon.loop import EventLoop, Timer
from shmsched.daemon.run_ahead import LONG_STEP_S, RunAhead
from shmsched.daemon.session_slots import SessionSlots
from shmsched.daemon.watchdog import Watchdog
from shmsched.dataplane.batches import BATCH_SLOTS, Batch, BatchesInFlight
from shmsched.dataplane.core import Core
from shmsched.dataplane.layouts import BatchSlotLayout
from shmsched.dataplane.queues import StepQueues
from shmsched.dataplane.session import EnginePort, Session, Step
from shmsched.memory.segment import Segment
from shmsched.saying import say_trace
from shmsched.scheduling import SchedulerParams
from shmsched.wire import frames


class EngineState(Enum):
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


READY, ANYWHERE = EngineState.READY, frames.Rewinds.ANYWHERE


class EngineLink(EnginePort):
    """The scheduler's side of one incarnation of an engine. ``number`` is never used again, not even by its successor."""

    def __init__(
        self, connection: Connection, offer: frames.Offer, limits: SchedulerParams, config: DaemonConfig, core: Core, loop: EventLoop
    ) -> None:  # fmt: skip
        super().__init__(
            offer.model,
            offer.vocab_size,
            offer.max_session_tokens,
            limits.max_prefill_chunk_size,
            frames.Rewinds.of(offer.rewinds),
            StepQueues(limits.max_decode_sequences, limits.max_batch_size, exclusive_sessions=True),
            Linger(config.linger_share),
        )
        self.number = next(core.numbers)
        self.connection = connection
        self.peer = peer = connection.peer
        self.offer = offer
        self.limits = limits
        self.state = EngineState.STARTING
        self._core = core
        self._loop = loop
        self.linger_timer: Timer | None = None
        self._run_ahead = RunAhead(config.ahead_share)
        self.watchdog = Watchdog(loop, config.step_timeout_s, lambda: self.silent_since)
        self.blame: Callable[[Exception], None] = say_trace
        """Ends the engine's connection at the end of this turn, for a fault of ours in what is done for it alone."""
        self.ended: Callable[[str], None] = lambda why: None  # waits to be told how the engine's process ended
        self.pidfd = -1
        """Of its process, where that is not a child of the daemon."""
        self.record = EngineRecord()
        self.stale_answers = 0
        # An opening may wait in each slot while the engine runs a batch.
        peer.max_outbound += offer.max_sessions * (frames.MAX_OPTIONS + 64)
        size = BatchSlotLayout(limits.max_batch_size).size
        self.segment = Segment.create(BATCH_SLOTS * size, f"engine {offer.spec}")
        self.batches = BatchesInFlight(
            memoryview(self.segment.buffer), limits.max_decode_sequences, limits.max_batch_size, offer.vocab_size
        )
        self._slots = SessionSlots(offer.max_sessions, core.clock)
        self.heard_at = 0.0
        """When it last said something that it owed. What else it says does not make it any less stuck."""
        self.arenas = EngineArenas(peer)
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
            self.heard_at = self._core.clock.now()
        return session

    def forget_client(self, client: ClientLink) -> None:
        """No later batch names the client. The frame reaches the engine after the last one that does."""
        if self.arenas.forget(client) and self.state is not EngineState.DEAD:
            self.peer.send(frames.DetachArena(client.number))

    # --- batches --------------------------------------------------------------------------------------------------------

    @property
    def batch(self) -> Batch | None:
        """What it runs."""
        return self.batches.running

    @property
    def has_its_next(self) -> bool:
        """For some time to come it needs nothing of the scheduler."""
        return self.batches.following is not None and self.linger.mean_step_s > LONG_STEP_S

    def may_go(self, now: float) -> bool:
        """The engine is free, work is queued, and nobody is worth waiting for any longer."""
        queues = self.queues
        if self.batch is not None or self.state is not READY or not queues.queued:
            return False
        return now >= self.linger.deadline() or queues.ready_decodes >= self.limits.max_decode_sequences

    def dispatch(self, now: float) -> None:
        """Form a batch and hand it to the engine."""
        self.linger.gave_up()
        if self.linger_timer is not None:
            # It would wake the loop while the batch runs, to find nothing to do.
            self.linger_timer.cancel()
            self.linger_timer = None
        # Steps that cannot be given stay queued, where the end of the engine finds them.
        batch = self.queues.hand_over(partial(self.batches.give, now))
        if batch is None:
            return
        self._core.ledger.dispatch(batch.steps)
        if batch.raw:
            self.arenas.give(batch.steps)
        self.peer.send(frames.Work(batch.number, batch.number % BATCH_SLOTS))
        failpoints.hit("daemon.work.half_sent", self.peer.flush_half)

    def run_ahead(self, now: float) -> bool:
        """Have the engine go on with the next tokens of the generations in its batch, without a pause, where it would do so anyway:
        nothing else is queued for it, and no session is expected back that would rather be in the same batch.

        What comes after that waits for one batch of decodes more: so it is done late, where a step is long. A generation that turns
        out to have ended has taken one token too many in the engine, which is rewound if the session goes on. Whether it was done.
        """
        batch = self.batch
        if (
            batch is None
            # Else a client may come back with its next step.
            or not batch.generates
            or self.batches.following is not None
            or self.state is not READY
            or self.queues.queued
            or self.linger.expected
            or self.rewinds is not ANYWHERE
        ):
            return False
        if not self._run_ahead.is_due(batch.started, self.linger.mean_step_s, now, self._loop, self._look):
            return False
        number = self.batches.give_ahead(batch)
        if number is not None:
            self.peer.send(frames.Follow(number, number % BATCH_SLOTS, number - 1))
        return number is not None

    def _look(self) -> None:
        self._core.touched_engines.add(self)

    def take_back(self, number: int) -> Batch | None:
        """It has answered this batch. None if that is another one than it runs: that is counted, and ignored."""
        batch = self.batches.take_back(number)
        if batch is None:
            self.stale_answers += 1
        else:
            self.heard_at = self._core.clock.now()
        return batch

    def finish(self, batch: Batch, came: Iterable[int]) -> None:
        """The batch has ended. ``came``: the sessions that got a token and have nothing queued."""
        now = self.heard_at
        seconds = now - batch.started
        self._run_ahead.batch_ended(seconds)
        self.record.add(batch, seconds)
        # Of what was given ahead some may not count any more, and was run all the same.
        n_tokens = max(batch.n_tokens, batch.size)
        self.linger.batch_ended(now, seconds, n_tokens, came, self.queues.queued_chunks > 0)

    def go_on(self, followers: dict[int, Step], *, ran: bool = True) -> None:
        """The batch has ended, and these come after its steps: the engine has gone on with them, or they are queued.

        ``ran``: not where the engine skips what was to follow.
        """
        core, following, now = self._core, self.batches.following, self.heard_at
        queued = list(followers.values()) if following is None or not ran else []
        if following is not None:
            begun = followers if ran else {}
            if ran and following.deadline <= now:
                # Who was not dispatched by its deadline is queued, where that is found out.
                queued = [step for step in followers.values() if 0.0 < step.deadline <= now]
                begun = {place: step for place, step in followers.items() if step not in queued}
            core.ledger.dispatch(self.batches.go_on(begun, now))
        if queued:
            core.queue(self, queued, now)

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

    # --- death ----------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The engine is as good as dead, and everything that it held is settled. Rows in flight stay held until ``buried``."""
        if self.linger_timer is not None:
            self.linger_timer.cancel()
        self._run_ahead.end()
        self.watchdog.end()
        # The turns that ended sessions keep in them refer to sessions, and those to this link.
        self.queues.clear()

    def buried(self) -> None:
        """Its process has ended: nobody writes into its rows. Idempotent: that, and the end of its connection, both say so."""
        if self._buried:
            return
        self._buried = True
        batch = self.batches.clear()
        for step in batch.steps if batch is not None else ():
            step.session.client.return_rows(step)
        self.arenas.clear()
        self.segment.close_descriptor()
        # Whatever still refers to this link (a step whose deadline is far, say) must not keep the memory mapped.
        del self.segment

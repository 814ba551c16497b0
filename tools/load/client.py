"""What one client process of the stress tool does: ``python -m shmsched.tools.load.client``.

It reads lines from standard input (its plan as JSON, then ``go``, then ``stop``) and writes JSON lines to what was its
standard output. The end of its input means that its parent is gone.
"""

from __future__ import annotations

import heapq
import json
import queue
import sys
import threading
import time
from dataclasses import dataclass, field

from shmsched import (
    Client,
    ClientClosed,
    Full,
    Model,
    NoEngine,
    SchedulerDied,
    SchedulerStopped,
    SharedMemoryError,
    ShmschedError,
    SystemLimit,
)
from shmsched.tools.load.flight import Flight, Pulse, Shared, say_failed
from shmsched.tools.load.generators import Generators
from shmsched.tools.load.loop import ClosedLoop
from shmsched.tools.load.options import MODEL, ClientPlan, Mode
from shmsched.tools.load.orders import Orders, Teller, watch_parent
from shmsched.tools.load.rows import HeldLeases, RowCheck
from shmsched.tools.load.tally import Tally
from shmsched.tools.load.turns import Choices

CONNECT_S = 10.0
TELL_S = 0.2
RETRY_S = 0.005
RETRY_AFTER_FAILURE_S = 0.1
SMALL_ARENA = 16 << 20
"""For those that make thousands of connections: reserving 64 MiB for each takes longer than all that they do."""


class Driver:
    """All sessions of one connection. The closed loops run in one thread, which futures' callbacks feed through a queue."""

    def __init__(self, client: Client, model: Model, plan: ClientPlan, tell: Teller, told: Telling, life: int) -> None:
        info, max_chunk = model.info, model.max_prefill_chunk_size
        check = RowCheck(info.vocab_size)
        self.shared = Shared(
            client, Tally(connects=1), check, HeldLeases(check), told.landings, told.pulse, plan.peers_fall
        )
        self.generators = Generators(client, model, plan, told.pulse, life)
        self._plan = plan
        self._tell = tell
        self._told = told
        self._retries: list[tuple[float, int]] = []
        self._over = False
        self.loops = [
            ClosedLoop(
                self.shared,
                Choices(
                    Mode(plan.mode), info.vocab_size, max_chunk, info.max_session_tokens,
                    (plan.seed, plan.index, i, life), plan.cancel,
                ),
                info.vocab_size,
                max_chunk,
                info.max_session_tokens,
            )
            for i in range(plan.sessions - plan.generating)
        ]  # fmt: skip
        self._index = {loop: i for i, loop in enumerate(self.loops)}

    @property
    def tally(self) -> Tally:
        """What this connection has counted by now."""
        tally = Tally()
        tally.merge(self.shared.tally)
        with self.generators.counts.held() as generated:
            tally.merge(generated)
        return tally

    def run(self, end: float) -> None:
        """Until told to stop, its life is over, or the scheduler is gone; then until everything is settled, or never will be."""
        self.generators.start()
        for loop in self.loops:
            self._turn(loop)
        while not self._over and (now := time.monotonic()) < end:
            self._retry(now)
            wait = min(TELL_S, self._retries[0][0] - now) if self._retries else TELL_S
            self._step(max(wait, 0.0), going_on=True)
            self._over = self._over or self._has_lived()
        deadline = time.monotonic() + self._plan.drain_s
        while any(loop.flights for loop in self.loops) and time.monotonic() < deadline:
            self._step(TELL_S, going_on=False)
        self.generators.end(deadline)
        self._finish()

    def _has_lived(self) -> bool:
        life = self._plan.life_steps
        return bool(life) and self.shared.tally.completed + self.generators.counts.tally.completed >= life

    def _step(self, timeout: float, *, going_on: bool) -> None:
        """Handle one landing, or the wish to stop, or none in time."""
        counted, generated = self.shared.tally, self.generators.counts.tally
        if self._told.is_due(counted.wrong + counted.failed + generated.wrong + generated.failed):
            outstanding = sum(f.steps for loop in self.loops for f in loop.flights) + self.generators.outstanding
            self._told.tell(self._tell, self.tally, outstanding)
        try:
            flight = self.shared.landings.get(timeout=timeout)
        except queue.Empty:
            return
        if flight is None:
            self._over = self._told.stopped = True
            return
        loop = flight.loop
        if loop not in self._index:
            # Of a connection before this one, on which it was lost.
            return
        loop.landed(flight)
        del flight
        self._changed(self.shared.held.check_due())
        if not going_on:
            return
        if self.shared.to_cancel:
            late = self.shared.to_cancel.popleft()
            late.loop.cancel(late)
        if loop.idle and not self._waits(loop):
            self._turn(loop)

    def _turn(self, loop: ClosedLoop) -> None:
        try:
            loop.take_turn()
        except Full as e:
            # It may be the rows held here that are missing.
            self._changed(self.shared.held.check_all())
            if not loop.idle:
                return
            if loop.starves(quiet=not any(other.flights for other in self.loops)):
                loop.refused(e)
            self._retry_in(RETRY_S, loop)
        except (SchedulerDied, SchedulerStopped, ClientClosed) as e:
            loop.refused(e)
            self._over = True
        except ShmschedError as e:
            loop.refused(e)
            if loop.idle:
                self._retry_in(RETRY_AFTER_FAILURE_S, loop)

    def _retry_in(self, seconds: float, loop: ClosedLoop) -> None:
        heapq.heappush(self._retries, (time.monotonic() + seconds, self._index[loop]))

    def _waits(self, loop: ClosedLoop) -> bool:
        index = self._index[loop]
        return any(i == index for _, i in self._retries)

    def _retry(self, now: float) -> None:
        while self._retries and self._retries[0][0] <= now:
            loop = self.loops[heapq.heappop(self._retries)[1]]
            if loop.idle:
                self._turn(loop)

    def _changed(self, faults: list[str]) -> None:
        for fault in faults:
            self.tally.say_wrong(fault)

    def _finish(self) -> None:
        self._changed(self.shared.held.check_all())
        for loop in self.loops:
            for flight in loop.flights:
                self.tally.lost += flight.steps
                self.tally.examples.insert(0, f"lost: {flight}")
        # Half of them are left to the end of the connection, which must do as well.
        for loop in self.loops[::2]:
            loop.close()


@dataclass(slots=True)
class Telling:
    """What outlives a connection: what was counted before it, and when it was last told."""

    landings: queue.SimpleQueue[Flight | None] = field(default_factory=queue.SimpleQueue)
    pulse: Pulse = field(default_factory=Pulse)
    before: Tally = field(default_factory=Tally)
    """Of the connections that are over."""
    stopped: bool = False
    """The parent wants no more."""
    _at: float = 0.0
    _faults: int = 0

    def is_due(self, faults: int) -> bool:
        # A fault is told at once: its finder may be killed in the next moment.
        return time.monotonic() - self._at >= TELL_S or faults > self._faults

    def tell(self, tell: Teller, tally: Tally, outstanding: int) -> None:
        self._at, self._faults = time.monotonic(), tally.wrong + tally.failed
        tell("progress", tally=self.all(tally).to_json(), outstanding=outstanding, pauses=self.pulse.take())

    def all(self, tally: Tally) -> Tally:
        total = Tally()
        total.merge(self.before)
        total.merge(tally)
        return total


def main() -> int:
    """0: it told its final counts. 1: it told why it could not."""
    tell = Teller()
    orders = Orders()
    plan = ClientPlan(**json.loads(orders.next()))
    go = threading.Event()
    told = Telling()
    threading.Thread(target=watch_parent, args=(orders, lambda: told.landings.put(None), go), daemon=True).start()
    try:
        seconds = _live(plan, tell, told, go)
        tell("final", seconds=seconds, tally=told.before.to_json(), pauses=told.pulse.take())
    except ShmschedError as e:
        tell("error", message=f"{type(e).__name__}: {e}")
        return 1
    return 0


def _live(plan: ClientPlan, tell: Teller, told: Telling, go: threading.Event) -> float:
    """Connect and work, again and again if it is to. Returns for how many seconds."""
    started = 0.0
    life = 0
    while not told.stopped:
        with connected(plan, told.before, arena_bytes=SMALL_ARENA if plan.life_steps else None) as client:
            driver = Driver(client, served(client), plan, tell, told, life)
            if life == 0:
                tell("ready")
                go.wait()
                started = time.monotonic()
            driver.run(started + plan.give_up_s)
        told.before.merge(driver.tally)
        life += 1
        if not plan.life_steps or time.monotonic() >= started + plan.give_up_s:
            break
    return time.monotonic() - started


def connected(plan: ClientPlan, tally: Tally, arena_bytes: int | None = None) -> Client:
    """A connection. Where things run short it is tried again, which counts as a step that failed of it."""
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return Client(socket=plan.socket, wait=CONNECT_S, arena_bytes=arena_bytes)
        except (SharedMemoryError, SystemLimit) as e:
            if not plan.peers_fall or time.monotonic() >= deadline:
                raise
            say_failed(tally, e, 1, "a connection", peers_fall=plan.peers_fall)
        time.sleep(RETRY_AFTER_FAILURE_S)


def served(client: Client, name: str = MODEL) -> Model:
    """The model, once it is served: while every engine is being started again nothing is, and a moment later nothing may be."""
    deadline = time.monotonic() + CONNECT_S
    while (model := client.models.get(name)) is None:
        if time.monotonic() >= deadline:
            raise NoEngine(f"no engine of model {name!r} came within {CONNECT_S:g} s")
        time.sleep(RETRY_S)
    return model


if __name__ == "__main__":
    sys.exit(main())

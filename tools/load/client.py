"""What one client process of the stress tool does: ``python -m shmsched.tools.load.client``.

It reads lines from standard input (its plan as JSON, then ``go``, then ``stop``) and writes JSON lines to what was its
standard output. The end of its input means that its parent is gone.
"""

from __future__ import annotations

import heapq
import json
import os
import queue
import sys
import threading
import time
from typing import Any

from shmsched import Client, ClientClosed, Full, SchedulerDied, SchedulerStopped, ShmschedError
from shmsched.tools.load.flight import Shared
from shmsched.tools.load.loop import ClosedLoop
from shmsched.tools.load.options import MODEL, ClientPlan, Mode
from shmsched.tools.load.rows import HeldLeases, RowCheck
from shmsched.tools.load.tally import Tally
from shmsched.tools.load.turns import Choices

CONNECT_S = 10.0
TELL_S = 0.2
RETRY_S = 0.005
RETRY_AFTER_FAILURE_S = 0.1
ORPHAN_S = 10.0


class Driver:
    """All closed loops of one client, in one thread: futures' callbacks feed its queue."""

    def __init__(self, client: Client, plan: ClientPlan, tell: Teller) -> None:
        info = client.models[MODEL].info
        max_chunk = client.models[MODEL].max_prefill_chunk_size
        check = RowCheck(info.vocab_size)
        self.tally = Tally()
        self.shared = Shared(client, self.tally, check, HeldLeases(check))
        self._plan = plan
        self._tell = tell
        self._told = 0.0
        self._retries: list[tuple[float, int]] = []
        self._over = False
        self.loops = [
            ClosedLoop(
                self.shared,
                Choices(
                    Mode(plan.mode), info.vocab_size, max_chunk, info.max_session_tokens, (plan.seed, plan.index, i)
                ),
                info.vocab_size,
                max_chunk,
                info.max_session_tokens,
            )
            for i in range(plan.sessions)
        ]
        self._index = {loop: i for i, loop in enumerate(self.loops)}

    def run(self) -> None:
        """Until told to stop, or the scheduler is gone; then until everything is settled, or never will be."""
        end = time.monotonic() + self._plan.give_up_s
        for loop in self.loops:
            self._turn(loop)
        while not self._over and (now := time.monotonic()) < end:
            self._retry(now)
            wait = min(TELL_S, self._retries[0][0] - now) if self._retries else TELL_S
            self._step(max(wait, 0.0), going_on=True)
        deadline = time.monotonic() + self._plan.drain_s
        while any(loop.flights for loop in self.loops) and time.monotonic() < deadline:
            self._step(TELL_S, going_on=False)
        self._finish()

    def _step(self, timeout: float, *, going_on: bool) -> None:
        """Handle one landing, or the wish to stop, or none in time."""
        now = time.monotonic()
        if now - self._told >= TELL_S:
            self._told = now
            outstanding = sum(f.steps for loop in self.loops for f in loop.flights)
            self._tell(
                "progress", completed=self.tally.completed, sent=self.tally.sent, outstanding=outstanding,
                wrong=self.tally.wrong, failed=self.tally.failed,
            )  # fmt: skip
        try:
            flight = self.shared.landings.get(timeout=timeout)
        except queue.Empty:
            return
        if flight is None:
            self._over = True
            return
        loop = flight.loop
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


class Teller:
    """Writes messages to the parent."""

    def __init__(self) -> None:
        # Whatever prints to standard output, an import say, must not get in between.
        self._fd = os.dup(1)
        os.dup2(2, 1)

    def __call__(self, kind: str, **message: Any) -> None:
        data = json.dumps({"kind": kind, **message}).encode() + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]


class Orders:
    """Lines from the parent. Read without ``sys.stdin``, whose lock a waiting daemon thread would hold at exit."""

    def __init__(self) -> None:
        self._data = b""

    def next(self) -> str:
        """The next line; empty at the end."""
        while b"\n" not in self._data:
            data = os.read(0, 4096)
            if not data:
                return ""
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        return line.decode()


def _watch_parent(orders: Orders, stop: queue.SimpleQueue[Any], go: threading.Event) -> None:
    while order := orders.next():
        if order == "stop":
            stop.put(None)
        go.set()
    stop.put(None)
    go.set()
    # The driver ends now; if it cannot, nobody is left who would end it.
    time.sleep(ORPHAN_S)
    os._exit(3)


def main() -> int:
    """0: it told its final counts. 1: it told why it could not."""
    tell = Teller()
    orders = Orders()
    plan = ClientPlan(**json.loads(orders.next()))
    go = threading.Event()
    try:
        with Client(socket=plan.socket, wait=CONNECT_S) as client:
            driver = Driver(client, plan, tell)
            threading.Thread(target=_watch_parent, args=(orders, driver.shared.landings, go), daemon=True).start()
            tell("ready")
            go.wait()
            started = time.monotonic()
            driver.run()
            seconds = time.monotonic() - started
        tell("final", seconds=seconds, tally=driver.tally.to_json())
    except ShmschedError as e:
        tell("error", message=f"{type(e).__name__}: {e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

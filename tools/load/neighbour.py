"""The quiet neighbour: ``python -m shmsched.tools.load.neighbour``. One client with one session, on an engine that no fault hits.

It takes one step after the other, and measures how long it waits for each; and beside that, by a thread that only sleeps, how late
this machine lets anybody run.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field

from shmsched import Response, Session, ShmschedError, StepFuture
from shmsched.tools.load.client import TELL_S, connected, served
from shmsched.tools.load.flight import Pulse
from shmsched.tools.load.options import QUIET_MODEL, QUIET_STEP_S, ClientPlan
from shmsched.tools.load.orders import Orders, Teller, watch_parent
from shmsched.tools.load.tally import Tally
from shmsched.workers.echo import advance, answer

REST_S = 0.02
"""Between its steps: it is a guest, and no load."""
MOST_TOKENS = 2000
"""Then the session begins again, so that it holds what it held."""
PATIENCE_S = 120.0
LAST_S = 2.0
BOUND_S = QUIET_STEP_S + 0.5
"""Its engine runs its steps alone: a step, and what scheduler and client may take."""
NAP_S = 0.01
KEPT = 2000


@dataclass(frozen=True, slots=True)
class Wait:
    """One that took long."""

    at: float
    """When it began, in seconds of ``time.monotonic()``."""
    waited: float
    machine: float
    """How much of it a thread that only sleeps overslept, all in all."""


@dataclass(slots=True)
class Waits:
    """What is told of them."""

    longest: float = 0.0
    late: list[Wait] = field(default_factory=list)
    """Those beyond the bound: the first few."""
    n_late: int = 0

    def add(self, wait: Wait) -> None:
        self.longest = max(self.longest, wait.waited)
        if wait.waited > BOUND_S:
            self.n_late += 1
            if len(self.late) < KEPT:
                self.late.append(wait)


class Naps:
    """A thread that sleeps, and sees how late it wakes."""

    def __init__(self) -> None:
        self._woke: deque[tuple[float, float]] = deque(maxlen=20_000)
        threading.Thread(target=self._nap, daemon=True).start()

    def _nap(self) -> None:
        while True:
            due = time.monotonic() + NAP_S
            time.sleep(NAP_S)
            now = time.monotonic()
            if now - due > NAP_S:
                self._woke.append((now, now - due))

    def overslept(self, since: float) -> float:
        """Seconds by which it woke too late, from ``since`` on."""
        return sum(min(late, now - since) for now, late in list(self._woke) if now >= since)


def _live(
    session: Session, vocab: int, tally: Tally, waits: Waits, pulse: Pulse, over: threading.Event, tell: Teller
) -> None:
    naps = Naps()
    h, token, told_at = 0, 1, 0.0
    while not over.wait(REST_S):
        begins_again = session.position >= MOST_TOKENS
        h = advance(0 if begins_again else h, [token])
        tally.sent += 1
        began = time.monotonic()
        response = _answer(session.submit([token], position=0 if begins_again else None), over)
        waited = time.monotonic() - began
        waits.add(Wait(began, waited, naps.overslept(began) if waited > BOUND_S else 0.0))
        if response is None:
            tally.lost += 1
            tally.examples.append(f"lost: a step of the quiet neighbour, after {waited:.1f} s")
            return
        pulse.beat()
        tally.completed += 1
        tally.tokens += 1
        tally.rows_checked += 1
        tally.latency.add(waited * 1e6)
        token = int(response.tokens[0])
        if token != answer(h, vocab):
            tally.say_wrong(f"the quiet neighbour's step at {session.position - 1} has {token}, not {answer(h, vocab)}")
            token = answer(h, vocab)
        if began - told_at >= TELL_S:
            told_at = began
            tell("progress", tally=tally.to_json(), outstanding=0, pauses=pulse.take(), waits=asdict(waits))


def _answer(future: StepFuture, over: threading.Event) -> Response | None:
    """None if it has not come in PATIENCE_S, or soon after the run was over."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            return future.result(LAST_S)
        except TimeoutError:
            if over.is_set():
                break
    return None


def main() -> int:
    """0: it told its final counts. 1: it told why it could not."""
    tell, orders = Teller(), Orders()
    plan = ClientPlan(**json.loads(orders.next()))
    go, over = threading.Event(), threading.Event()
    threading.Thread(target=watch_parent, args=(orders, over.set, go), daemon=True).start()
    tally, waits, pulse = Tally(), Waits(), Pulse()
    try:
        with connected(plan, tally) as client:
            vocab = served(client, QUIET_MODEL).info.vocab_size
            session = client.open_session(model=QUIET_MODEL)
            tally.connects, tally.sessions_opened = 1, 1
            tell("ready")
            go.wait()
            began = time.monotonic()
            _live(session, vocab, tally, waits, pulse, over, tell)
            session.close()
            tally.sessions_closed = 1
        tell("final", seconds=time.monotonic() - began, tally=tally.to_json(), pauses=pulse.take(), waits=asdict(waits))
    except ShmschedError as e:
        tell("error", message=f"{type(e).__name__}: {e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

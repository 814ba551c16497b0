"""The client that is interrupted: ``python -m shmsched.tools.load.interrupted``.

A signal's handler raises in the middle of its calls, at any moment. After each interrupt the session says where it stands, or why
it has ended; the next step answers as what it holds says; and no session is open that nobody has.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from shmsched import (
    Client,
    Control,
    Full,
    Model,
    NoEngine,
    Response,
    Session,
    SessionClosed,
    SessionLost,
    ShmschedError,
    StepError,
)
from shmsched.client.generation import Generation
from shmsched.tools.load.client import RETRY_S, TELL_S, connected, served
from shmsched.tools.load.flight import Pulse, say_failed
from shmsched.tools.load.options import MODEL, ClientPlan
from shmsched.tools.load.orders import Orders, Teller, watch_parent
from shmsched.tools.load.tally import Tally
from shmsched.workers.echo import advance, answer

WHO = "the client that is interrupted"
LEFT_S = 5.0
PATIENCE_S = 30.0
MOST_TOKENS = 200
"""After so many at the most the session is closed, and another one opened."""
LONGEST_CALL_S = 0.01
"""An interrupt comes within so much of a call's begin, most of them much earlier, or not at all if the call has returned by then."""
OPEN_S = 10.0
T = TypeVar("T")


class Interrupted(BaseException):
    """As KeyboardInterrupt: no error that anybody may handle and go on."""


class Interrupts:
    """Raises within calls only: what the tool itself does meanwhile is not on trial."""

    def __init__(self, every_s: float, seed: str) -> None:
        self.came: Counter[str] = Counter()
        self._every_s = every_s
        self._random = random.Random(seed)
        self._next = time.monotonic() + every_s
        self._inside = False
        signal.signal(signal.SIGALRM, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._inside:
            self._inside = False
            raise Interrupted

    def call(self, name: str, call: Callable[[], T]) -> T:
        """Make it, or raise Interrupted."""
        if time.monotonic() < self._next:
            return call()
        self._next = time.monotonic() + self._every_s * self._random.uniform(0.5, 1.5)
        try:
            self._inside = True
            signal.setitimer(signal.ITIMER_REAL, LONGEST_CALL_S * 10.0 ** self._random.uniform(-3.0, 0.0))
            result = call()
            self._inside = False
        except Interrupted:
            self.came[name] += 1
            raise
        finally:
            self._inside = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        return result


class Trial:
    """One session after the other, on one connection."""

    def __init__(self, client: Client, model: Model, plan: ClientPlan, tally: Tally) -> None:
        self._client = client
        self._vocab = model.info.vocab_size
        self._plan = plan
        self._tally = tally
        self._random = random.Random(f"{plan.seed} interrupted")
        self.interrupts = Interrupts(plan.interrupt_every_s, f"{plan.seed} interrupts")
        self.pulse = Pulse()

    def run(self, over: threading.Event, tell: Callable[[], None]) -> None:
        while not over.is_set():
            try:
                session = self.interrupts.call(
                    "open_session", partial(self._client.open_session, timeout=OPEN_S, model=MODEL)
                )
            except Interrupted:
                continue
            except Full:
                self._tally.full += 1
                continue
            except (NoEngine, SessionLost):
                # None is up, or the one that was opening it has ended.
                time.sleep(RETRY_S)
                continue
            self._tally.sessions_opened += 1
            try:
                self._use(session, over, tell)
            except (StepError, SessionLost, SessionClosed) as e:
                say_failed(self._tally, session.ended or e, 1, f"{WHO}, {session}", peers_fall=self._plan.peers_fall)
            except TimeoutError:
                self._tally.sent += 1
                self._tally.lost += 1
                self._tally.examples.insert(0, f"lost: {WHO} waited {PATIENCE_S:g} s for {session}")
            self._close(session)
            self._tally.sessions_closed += 1

    def _close(self, session: Session) -> None:
        try:
            self.interrupts.call("close", session.close)
        except Interrupted:
            # Half closed or not at all: to close it again ends it.
            session.close()
        except ShmschedError as e:
            # Whatever became of the session, there is nothing left to fail.
            self._tally.say_failed(e, 1, f"{WHO}, close() of {session}")

    def _use(self, session: Session, over: threading.Event, tell: Callable[[], None]) -> None:
        held: list[int] = []
        unfed = False
        enough = self._random.randint(1, MOST_TOKENS)
        while len(held) < enough and not over.is_set():
            tokens = [self._random.randrange(self._vocab) for _ in range(self._random.randint(1, 40))]
            start = self._random.randint(0, len(held)) if self._random.random() < 0.2 else len(held)
            before = held
            if not unfed and self._random.random() < 0.7:
                held, unfed = self._generation(session, held, tokens), True
            else:
                # After a generation a step: another generation would begin with the token that this one gave last.
                held = self._step(session, held, start, tokens)
                unfed = unfed and held == before
            self._tally.rows_checked += 1
            tell()

    # --- each gives what the session holds now, after a look at what came -------------------------------------------------

    def _step(self, session: Session, held: list[int], start: int, tokens: list[int]) -> list[int]:
        def step() -> Response:
            return session.submit(tokens, position=None if start == len(held) else start).result(PATIENCE_S)

        after = held[:start] + tokens
        try:
            response = self.interrupts.call("submit", step)
        except Interrupted:
            return self._holds(session, held, [after[:n] for n in range(start, len(after) + 1)])
        self._completed(1, len(tokens))
        wanted = self._foreseen(after, 1)
        if response.tokens.tolist() != wanted:
            self._tally.say_wrong(f"{WHO} had {response.tokens.tolist()}, not {wanted}")
        return self._holds(session, after, [])

    def _generation(self, session: Session, held: list[int], tokens: list[int]) -> list[int]:
        n = self._random.randint(2, 12)
        came: list[int] = []
        foreseen = self._foreseen(held + tokens, n)
        whole = held + tokens + foreseen[:-1]
        generations: list[Generation] = []

        def generate() -> None:
            generations.append(session.generate(tokens, max_new_tokens=n, stop_tokens=()))
            came.extend(generations[0])

        try:
            self.interrupts.call("generate", generate)
        except Interrupted:
            for generation in generations:
                generation.close()
            generations.clear()
            return self._holds(session, held, [whole[:n] for n in range(len(held), len(whole) + 1)])
        self._completed(n, len(tokens) + n - 1)
        if came != foreseen:
            self._tally.say_wrong(f"{WHO} was given {came}, not {foreseen}")
        return self._holds(session, whole, [])

    def _foreseen(self, tokens: list[int], n: int) -> list[int]:
        h = advance(0, tokens)
        said: list[int] = []
        for _ in range(n):
            said.append(answer(h, self._vocab))
            h = advance(h, said[-1:])
        return said

    def _completed(self, steps: int, n_tokens: int) -> None:
        self.pulse.beat()
        self._tally.sent += steps
        self._tally.completed += steps
        self._tally.tokens += n_tokens

    def _holds(self, session: Session, one: list[int], others: list[list[int]]) -> list[int]:
        """What the session holds, which must be one of these."""
        if session.ended is not None:
            raise session.ended
        holds: list[int] = session.history.tolist()
        self._tally.unseen += MOST_TOKENS if others else 0
        if session.position != len(holds) or holds not in (one, *others):
            self._tally.say_wrong(
                f"{WHO}: its {session} stands at {session.position} and holds {len(holds)} tokens, which are neither the {len(one)}"
                " that it held before nor with what was submitted since"
            )
        return holds


def _left_open(socket: str) -> int:
    """Sessions that the daemon holds for this process, which has none any more; as its pid tells, so 0 in a PID namespace."""
    deadline = time.monotonic() + LEFT_S
    while True:
        gc.collect()
        with Control(socket) as control:
            clients = control.status()["clients"]
        left: int = sum(client["sessions"] for client in clients if client["pid"] == os.getpid() > 1)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(RETRY_S)


def main() -> int:
    """0: it told its final counts. 1: it told why it could not."""
    tell, orders = Teller(), Orders()
    plan = ClientPlan(**json.loads(orders.next()))
    go, over = threading.Event(), threading.Event()
    threading.Thread(target=watch_parent, args=(orders, over.set, go), daemon=True).start()
    tally = Tally(connects=1)
    told_at = 0.0
    try:
        with connected(plan, tally) as client:
            trial = Trial(client, served(client), plan, tally)

            def counts() -> dict[str, Any]:
                return {
                    "tally": tally.to_json(),
                    "pauses": trial.pulse.take(),
                    "interrupts": dict(trial.interrupts.came),
                }

            def tell_now_and_then() -> None:
                nonlocal told_at
                if time.monotonic() - told_at >= TELL_S:
                    told_at = time.monotonic()
                    tell("progress", outstanding=0, **counts())

            tell("ready")
            go.wait()
            began = time.monotonic()
            trial.run(over, tell_now_and_then)
            if left := _left_open(plan.socket):
                tally.say_wrong(f"{left} sessions are open in the daemon that {WHO} does not have")
        tell("final", seconds=time.monotonic() - began, **counts())
    except ShmschedError as e:
        tell("error", message=f"{type(e).__name__}: {e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

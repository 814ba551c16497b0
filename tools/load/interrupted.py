"""The client that is interrupted: ``python -m shmsched.tools.load.interrupted``.

A signal's handler raises in the middle of its calls, at any moment. After each interrupt the session says where it stands, or why
it has ended; the next step answers as what it holds says; and no session is open that nobody has.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from shmsched import Client, Control, Generation, NoEngine
from shmsched.tools.load.chaos import Fault
from shmsched.tools.load.choices import Drawn
from shmsched.tools.load.mirror import I32, Mirror
from shmsched.tools.load.part import RETRY_S, Parent, run, served
from shmsched.tools.load.worker import Worker

LEFT_S = 5.0
MOST_TOKENS = 200
"""After so many at the most the session is closed, and another one opened."""
LONGEST_CALL_S = 0.01
"""An interrupt comes within so much of a call's begin, most of them much earlier, or not at all if the call has returned by then."""
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


class Trial(Worker):
    """It steps and generates, and goes on after each interrupt."""

    def __init__(self, client: Client, parent: Parent) -> None:
        super().__init__(client, served(client), parent, parent.over)
        plan = parent.plan
        self._draws = Drawn(self.vocab, plan.seed, None)
        self._interrupts = Interrupts(plan.options.chaos.every_s[Fault.INTERRUPT], f"{plan.seed} interrupts")
        self.tally.interrupts = self._interrupts.came
        self._generation: Generation | None = None

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._interrupts.call(function.__name__, partial(self.called, function, *args, **kwargs))

    async def run(self) -> None:
        while not self.over.is_set():
            try:
                await super().run()
            except Interrupted:
                if self.session is not None:
                    # Half closed or not at all: to close it again ends it.
                    self.session.close()

    def failed(self, error: BaseException, steps: int, where: str) -> None:
        if not isinstance(error, NoEngine):
            super().failed(error, steps, where)

    async def use(self, session: Any) -> None:
        mirror, random = Mirror(self.vocab), self._draws.random
        enough = random.randint(1, MOST_TOKENS)
        while len(mirror) < enough and not self.over.is_set():
            tokens = self._draws.tokens(random.randint(1, 40))
            start = random.randint(0, len(mirror)) if self._draws.chance(0.2) else len(mirror)
            # After a generation a step: another generation would begin with the token that this one gave last.
            generates = mirror.unfed is None and self._draws.chance(0.7)
            start = len(mirror) if generates else start
            n = random.randint(2, 12) if generates else 1
            foreseen = mirror.continuation(start, tokens, n)
            after = mirror.upto(start)
            after.feed(start, np.concatenate([tokens, foreseen[:-1]]).astype(np.int32))
            try:
                if generates:
                    await self._generate(session, tokens, foreseen)
                    mirror = after
                    mirror.unfed = foreseen[-1]
                else:
                    await self.step(session, mirror, tokens, start)
                    mirror.unfed = None
            except Interrupted:
                self.tally.unseen += MOST_TOKENS
                if self._generation is not None:
                    self._generation.close()
                mirror = self._held(session, mirror, after, start)
                mirror.unfed = tokens[0] if generates else mirror.unfed
            self._generation = None
            self.compare(session, mirror)

    async def _generate(self, session: Any, tokens: I32, foreseen: list[int]) -> None:
        def generate() -> list[int]:
            self._generation = session.generate(tokens, max_new_tokens=len(foreseen), stop_tokens=())
            return list(self._generation)

        came = await self.call(generate)
        self.answered(len(foreseen), len(tokens) + len(foreseen) - 1)
        if came != foreseen:
            self.spoilt(session, f"a generation gave {came}, not {foreseen}")

    def _held(self, session: Any, before: Mirror, after: Mirror, start: int) -> Mirror:
        """What it may hold where it stands: what it held before, or more of what was submitted than ``start``."""
        if session.ended is not None:
            raise session.ended
        if session.position == len(before) and before.fault(session) is None:
            return before
        return after.upto(session.position) if session.position >= start else before


def _left_open(parent: Parent) -> int:
    """Sessions that the daemon holds for this process, which has none any more; as its pid tells, so 0 in a PID namespace."""
    deadline = time.monotonic() + LEFT_S
    while True:
        gc.collect()
        with Control(parent.plan.socket) as control:
            clients = control.status()["clients"]
        left: int = sum(client["sessions"] for client in clients if client["pid"] == os.getpid() > 1)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(RETRY_S)


def work(parent: Parent) -> None:
    with parent.connected() as client:
        trial = Trial(client, parent)
        parent.counting = [trial]
        parent.ready()
        trial.in_thread()
        if left := _left_open(parent):
            trial.wrong(f"{left} sessions are open in the daemon that the client that is interrupted does not have")


if __name__ == "__main__":
    sys.exit(run(work))

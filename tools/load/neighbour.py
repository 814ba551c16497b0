"""The quiet neighbour: ``python -m shmsched.tools.load.neighbour``. One client with one session, on an engine that no fault hits.

It takes one step after the other, and measures how long it waits for each; and beside that, by a thread that only sleeps, how late
this machine lets anybody run.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import Any

import numpy as np

from shmsched.tools.load.mirror import Mirror
from shmsched.tools.load.options import QUIET_MODEL, QUIET_STEP_S
from shmsched.tools.load.part import Parent, run, served
from shmsched.tools.load.tally import Wait
from shmsched.tools.load.worker import Worker

REST_S = 0.02
"""Between its steps: it is a guest, and no load."""
MOST_TOKENS = 2000
"""Then the session begins again, so that it holds what it held."""
BOUND_S = QUIET_STEP_S + 0.5
"""Its engine runs its steps alone: a step, and what scheduler and client may take."""
NAP_S = 0.01
KEPT = 500


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


class Quiet(Worker):
    patience_s = 120.0

    async def use(self, session: Any) -> None:
        mirror, naps = Mirror(self.vocab), Naps()
        while not self.over.wait(REST_S):
            start = 0 if len(mirror) >= MOST_TOKENS else len(mirror)
            token = np.array([mirror.unfed or 1], np.int32)
            began = time.monotonic()
            try:
                await self.step(session, mirror, token, start)
            finally:
                waited = time.monotonic() - began
                self.tally.took(waited)
                self.tally.longest_wait = max(self.tally.longest_wait, waited)
                if waited > BOUND_S:
                    self.tally.late += 1
                    if self.tally.late <= KEPT:
                        self.tally.late_waits.append(Wait(began, waited, naps.overslept(began)))


def work(parent: Parent) -> None:
    with parent.connected() as client:
        quiet = Quiet(client, served(client, QUIET_MODEL), parent, parent.over)
        parent.counting = [quiet]
        parent.ready()
        quiet.in_thread()


if __name__ == "__main__":
    sys.exit(run(work))

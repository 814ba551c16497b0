"""When the daemon, as it is woken, may take the place of a process that runs, and when it waits for a free core."""

from __future__ import annotations

import os


class CpuPolicy:
    """As long as every engine that runs has its next batch already, nobody waits for the daemon, and it runs as SCHED_BATCH: what an
    engine says as it ends a batch then wakes it on a core that is free, or later. Else it interrupted just that engine, on its way
    into the next batch: with 10 ms steps on two cores, 32 generations took 11.2 ms a batch, and now take 10.8.

    With several engines it seldom is: each has its next batch in the last part of a step only.

    Where each token goes through its client it would be late, and these steps a tenth slower: so it does not always wait.
    """

    def __init__(self) -> None:
        self.yields = False
        """It waits for a free core."""
        self._may = False

    def begin(self) -> None:
        """From here on the calling thread is the daemon's. Other threads, and what they start, keep their policy."""
        # Whoever started it with a policy of his own has his reasons.
        self._may = os.sched_getscheduler(0) == os.SCHED_OTHER

    def set(self, yields: bool) -> None:
        """Change, where it is not so already."""
        if yields is not self.yields and self._may:
            self.yields = yields
            try:
                os.sched_setscheduler(0, os.SCHED_BATCH if yields else os.SCHED_OTHER, os.sched_param(0))
            except OSError:
                # A sandbox may refuse it. The daemon is no worse off than before it tried.
                self._may = False

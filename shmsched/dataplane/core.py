"""What all parts of the daemon that see to steps have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from shmsched.dataplane.ledger import Ledger
from shmsched.dataplane.session import EnginePort
from shmsched.not_copied import not_copied


class Core:
    """The ledger, numbers, the clock, and who is to be seen to at the end of this turn."""

    __slots__ = ("clock", "ledger", "numbers", "touched_clients", "touched_engines", "watch")
    __reduce__ = not_copied

    def __init__(self, clock: Any, watch: Callable[[Any], None]) -> None:
        """``clock``: the daemon's. ``watch``: called with each queued step that has a deadline."""
        self.clock = clock
        self.watch = watch
        self.ledger = Ledger()
        self.numbers: Iterator[int] = itertools.count(1)
        """For steps, sessions, clients and engines: none is used twice."""
        self.touched_clients: set[Any] = set()
        """Those that have something to hear of at the end of this turn."""
        self.touched_engines: set[Any] = set()
        """Those that may have a batch to form at the end of this turn."""

    def queue(self, engine: EnginePort, steps: list[Any], now: float) -> None:
        """Entered steps of the engine's sessions may go into a batch from here on."""
        engine.queues.extend(steps)
        if engine.linger.minds:
            engine.linger.came_back([step.session.number for step in steps], now)
        self.touched_engines.add(engine)

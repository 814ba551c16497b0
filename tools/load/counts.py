"""What the sessions of a client that generate count together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shmsched.tools.load.flight import Pulse, say_failed
from shmsched.tools.load.tally import Tally


@dataclass(slots=True)
class Counts:
    """What all generating sessions of one client count, in one thread or several."""

    peers_fall: bool
    pulse: Pulse
    tally: Tally = field(default_factory=Tally)
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def held(self) -> Iterator[Tally]:
        with self.lock:
            yield self.tally

    def say_failed(self, error: BaseException, steps: int, where: str) -> None:
        with self.held() as tally:
            say_failed(tally, error, steps, where, peers_fall=self.peers_fall)

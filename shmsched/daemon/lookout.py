"""Looking after those whom a fault of ours may have made the loop forget."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shmsched.daemon.client_link import ClientLink
from shmsched.daemon.engine_link import EngineLink, EngineState
from shmsched.daemon.loop import EventLoop, Timer
from shmsched.dataplane.core import Core
from shmsched.saying import counted

LOOK_S = 0.5
FORGOTTEN = 3
"""Looks in a row at which the same is left undone. Nothing is put off for so long, and counting looks instead of seconds leaves out
the time in which this process did not run."""


class Lookout:
    """A client that was not told of its answer waits for ever, and so does a step that no engine was given.

    Each turn of the loop ends with both, for everybody. If that ever fails, it is made good within seconds, and the log says so.
    It looks only while something is outstanding: an idle daemon sleeps.
    """

    def __init__(
        self,
        core: Core,
        loop: EventLoop,
        clients: Mapping[int, ClientLink],
        engines: Mapping[int, EngineLink],
        log: Callable[[str], None],
    ) -> None:
        self._core = core
        self._loop = loop
        self._clients = clients
        self._engines = engines
        self._log = log
        self._timer: Timer | None = None
        self._undone: dict[int, tuple[object, int]] = {}
        """By the number of a client or engine: what was the last thing done for it, and at how many looks in a row."""

    def begin(self) -> None:
        """Something was submitted."""
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        before, self._undone = self._undone, {}
        for link in self._clients.values():
            if link.has_unannounced and self._is_forgotten(link.number, link.last_told, before):
                self._log(
                    f"answers to client {link.peer.name} lay unannounced for over {LOOK_S * (FORGOTTEN - 1):g} s, which is a"
                    " fault of the scheduler; the client is told now"
                )
                self._core.touched_clients.add(link)
        for engine in self._engines.values():
            if _is_overlooked(engine) and self._is_forgotten(engine.number, engine.batches.given, before):
                self._log(
                    f"engine {engine.offer.spec} ({engine.peer.name}) was idle for over {LOOK_S * (FORGOTTEN - 1):g} s with"
                    f" {counted(len(engine.queues), 'step')} queued, which is a fault of the scheduler; it is given a batch now"
                )
                self._core.touched_engines.add(engine)
        if self._undone or any(link.outstanding for link in self._clients.values()):
            self.begin()

    def _is_forgotten(self, number: int, last: object, before: dict[int, tuple[object, int]]) -> bool:
        known, looks = before.get(number, (None, 0))
        looks = looks + 1 if known == last else 1
        self._undone[number] = (last, looks)
        return looks >= FORGOTTEN


def _is_overlooked(engine: EngineLink) -> bool:
    """It is free, work is queued for it, and no timer will give it a batch."""
    return (
        engine.batch is None
        and engine.state is EngineState.READY
        and len(engine.queues) > 0
        and engine.linger_timer is None
    )

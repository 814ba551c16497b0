"""What one client does, again and again if it is to: ``python -m shmsched.tools.load.client``."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import Callable

from shmsched import AsyncClient, Client, Model, ShmschedError
from shmsched.tools.load.generating import Generating
from shmsched.tools.load.options import DRAIN_S
from shmsched.tools.load.part import RETRY_S, Parent, run, served
from shmsched.tools.load.submitting import Submitting
from shmsched.tools.load.worker import Worker

SMALL_ARENA = 16 << 20
"""For those that make thousands of connections: reserving 64 MiB for each takes longer than all that they do."""


class Connection:
    """All sessions of one connection, in a thread each; or those that generate on asyncio, by a connection of their own."""

    def __init__(self, client: Client, model: Model, parent: Parent, life: int) -> None:
        plan = parent.plan
        self._parent = parent
        self._model = model
        self._over = threading.Event()
        self._seed = (*plan.seed, life)
        self._workers: list[Worker] = [
            Submitting(client, model, parent, self._over, i, (*self._seed, i))
            for i in range(plan.options.sessions - plan.generating)
        ]
        on_asyncio = plan.on_asyncio and plan.generating > 0
        if not on_asyncio:
            self._workers += self._generating(client)
        parent.counting = self._workers
        self._threads = [self._thread(worker.in_thread) for worker in self._workers]
        if on_asyncio:
            self._threads.append(self._thread(lambda: asyncio.run(self._on_asyncio())))

    def _generating(self, client: Client | AsyncClient) -> list[Generating]:
        return [
            Generating(client, self._model, self._parent, self._over, i, (*self._seed, i, 1))
            for i in range(self._parent.plan.generating)
        ]

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except ShmschedError as e:
                self._parent.tally.say_failed(e, 1, "a thread", peers_fall=self._parent.plan.peers_fall)

        return threading.Thread(target=guarded, daemon=True)

    async def _on_asyncio(self) -> None:
        async with AsyncClient(socket=self._parent.plan.socket) as client:
            self._parent.tally.connects += 1
            workers = self._generating(client)
            self._workers += workers
            await asyncio.gather(*(worker.run() for worker in workers))

    def run(self) -> None:
        """Until told to stop, its life is over, or the scheduler is gone; then until everything is settled, or never will be."""
        for thread in self._threads:
            thread.start()
        life = self._parent.plan.life_steps
        while not self._over.wait(RETRY_S if life else 0.1):
            lived = sum(worker.tally.completed for worker in self._workers)
            if self._parent.gives_up or (life and lived >= life):
                self._over.set()
        deadline = time.monotonic() + DRAIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            if not worker.at_end:
                steps = max(1, worker.outstanding)
                worker.tally.say_lost(steps, f"{steps} steps of session {worker.session}, at the end")
        self._parent.absorb()


def work(parent: Parent) -> None:
    for life in itertools.count():
        with parent.connected(SMALL_ARENA if parent.plan.life_steps else None) as client:
            connection = Connection(client, served(client), parent, life)
            if life == 0:
                parent.ready()
            connection.run()
        if not parent.plan.life_steps or parent.gives_up:
            break


if __name__ == "__main__":
    sys.exit(run(work))

"""The sessions of one client that generate: in a thread each, or as tasks of one event loop."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial

from shmsched import AsyncClient, Client, Model, ShmschedError
from shmsched.tools.load.counts import Counts
from shmsched.tools.load.drawn import Draws
from shmsched.tools.load.flight import Pulse
from shmsched.tools.load.generating import Generating
from shmsched.tools.load.hands import Hands, Task, Thread
from shmsched.tools.load.options import ClientPlan

MODEL_S = 10.0


class Generators:
    """Starts them, and sees to it that they end."""

    def __init__(self, client: Client, model: Model, plan: ClientPlan, pulse: Pulse, life: int) -> None:
        self.counts = Counts(plan.peers_fall, pulse)
        self._plan = plan
        self._model = model
        self._life = life
        self._all: list[Generating] = []
        if plan.on_asyncio and plan.generating:
            self._threads = [self._thread(lambda: asyncio.run(self._all_on_asyncio()))]
        else:
            hands = Thread(client)
            self._all = [self._make(hands, i) for i in range(plan.generating)]
            self._threads = [self._thread(partial(hands.run, generating.run())) for generating in self._all]

    def _thread(self, run: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                run()
            except Exception as e:
                if not isinstance(e, ShmschedError):
                    traceback.print_exc()
                self.counts.say_failed(e, 1, "the sessions that generate")

        return threading.Thread(target=guarded, daemon=True)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def outstanding(self) -> int:
        return sum(generating.outstanding for generating in self._all)

    def end(self, deadline: float) -> None:
        """Let each end what it is at. Whatever is still waited for at the deadline is lost."""
        self.counts.over.set()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = sum(thread.is_alive() for thread in self._threads)
        if late:
            outstanding = self.outstanding
            with self.counts.held() as tally:
                # Of steps that never were answered nothing was counted yet.
                tally.sent += outstanding
                tally.lost += max(outstanding, late)
                tally.examples.insert(0, f"lost: {outstanding} steps of {late} threads that generate and did not end")

    def _make(self, hands: Hands, index: int) -> Generating:
        plan, model = self._plan, self._model
        # A part of its own keeps these choices apart from those of sessions that make turns.
        seed = (plan.seed, plan.index, index, self._life, 1)
        draws = Draws(model.info.vocab_size, model.info.max_session_tokens, seed, plan.cancel)
        return Generating(hands, self.counts, draws, model.info.vocab_size, model.max_prefill_chunk_size)

    async def _all_on_asyncio(self) -> None:
        async with AsyncClient(socket=self._plan.socket) as client:
            with self.counts.held() as tally:
                tally.connects += 1
            hands = Task(client)
            self._all = [self._make(hands, i) for i in range(self._plan.generating)]
            await asyncio.gather(*(hands.run(generating.run()) for generating in self._all))

"""Two generations and their engine, all played by hand, against a daemon in the test's own process."""

from __future__ import annotations

import numpy as np

from shmsched.daemon.foresight import Foresight
from shmsched.daemon.linger import Linger
from shmsched.memory.layouts import HEADER, SAMPLING, STEP, StepEntry, StepStatus
from shmsched.wire import frames
from shmsched.wire.frames import StepDescriptor, StepFlags

from fuzz.world import World

DONE, DEFERRED, FAILED = StepStatus.DONE, StepStatus.DEFERRED, StepStatus.FAILED
STOP = 7
"""The token that ends each."""


class Generations:
    """A client with sessions 1 and 2 that generate, and their engine, which has been given a batch and what follows it."""

    def __init__(self, world: World, further: tuple[int, ...] = (8, 8), linger_share: float = 0.0) -> None:
        """``linger_share``: by itself, how long a batch takes here is chance, and so is who is waited for."""
        self.world = world
        world.begin()
        self.client, self.engine = world.clients[0], world.engines[0]
        (link,) = world.daemon.engines.links.values()
        link.linger = Linger(linger_share)
        link.linger.mean_step_s = 10.0
        # What comes after a batch is given at once.
        link._foresight = Foresight(0.0)
        self.open_session(2)
        self.submit(*((i + 1, 0, n) for i, n in enumerate(further)))

    def open_session(self, session: int) -> None:
        """Of the client; the engine opens it."""
        self.client.say(frames.OpenSession(session, 0, "m", b""))
        self.world.turn()
        self.engine.say(frames.SlotOpened(*self.engine.openings.pop()))
        self.world.turn()

    def submit(self, *steps: tuple[int, int, int]) -> None:
        """Decodes: of which session, where, and how many may follow."""
        descriptors, client = [], self.client
        stops = sum(further > 0 for _, _, further in steps)
        for session, position, further in steps:
            client.request += 1
            client.tokens += 1
            sampling = SAMPLING.pack(0, 0.0, 1.0, 0)
            descriptors.append(
                StepDescriptor(
                    client.request, session, 1, position, 1, StepFlags.SAMPLED, sampling, 0, further, further > 0, 0.0
                )
            )
        client.say(frames.Submit(client.tokens, *client.cursors[:2], 0, descriptors, (STOP,) * stops))
        self.world.turn()

    def submit_chunks(self, session: int, chunks: list[tuple[int, int, int, bool]]) -> None:
        """Of one session: where, how many tokens, how many rows of output, and whether more of the submission follows."""
        descriptors, client, sampling = [], self.client, SAMPLING.pack(0, 0.0, 1.0, 0)
        for position, n, rows, more in chunks:
            client.request += 1
            client.tokens += n
            flags = StepFlags.SAMPLED | (StepFlags.MORE if more else 0)
            descriptors.append(StepDescriptor(client.request, session, n, position, rows, flags, sampling, 0))
        client.say(frames.Submit(client.tokens, *client.cursors[:2], 0, descriptors, ()))
        self.world.turn()

    def given(self, batch: int) -> list[tuple[int, int, int]]:
        """Slot, position and token of each step of the batch; where it follows another, a place in the place of the token."""
        memory, layout, at = self.engine.memory, self.engine.layout, self.engine.slot_of(batch)
        number, n, _ = HEADER.unpack_from(memory, at)
        assert number == batch
        entries = STEP.iter_unpack(memory[at + layout.steps_offset :][: STEP.size * n])
        tokens = np.frombuffer(memory, np.int32, n, at + layout.tokens_offset).tolist()
        return [(e.slot, e.position, token) for e, token in zip(map(StepEntry._make, entries), tokens, strict=True)]

    def answer(self, batch: int, *steps: tuple[StepStatus, int]) -> None:
        """A status and a token for each step."""
        assert self.engine.batches.pop(0) == batch
        memory, layout, at = self.engine.memory, self.engine.layout, self.engine.slot_of(batch)
        np.frombuffer(memory, np.uint8, len(steps), at + layout.statuses_offset)[:] = [status for status, _ in steps]
        np.frombuffer(memory, np.int32, len(steps), at + layout.ids_offset)[:] = [token for _, token in steps]
        self.say(frames.Done(batch, ("no",) * sum(status == FAILED for status, _ in steps)))

    def say(self, message: frames.Done | frames.BatchFailed | frames.Skipped) -> None:
        if not isinstance(message, frames.Done):
            assert self.engine.batches.pop(0) == message.batch
        self.engine.say(message)
        self.world.turn()
        self.world.check()

    @property
    def states(self) -> dict[str, int]:
        counts = self.world.daemon.settling.ledger.counts()
        found = {
            "queued": counts.queued,
            "in flight": counts.in_flight,
            "completed": counts.completed,
            "failed": counts.failed,
            "cancelled": counts.cancelled,
            "ignored": counts.ignored,
        }
        return {name: n for name, n in found.items() if n}

    @property
    def open(self) -> set[int]:
        return set(self.client.positions)

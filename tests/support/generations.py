"""Two generations and their engine, all played by hand, against a daemon in the test's own process."""

from __future__ import annotations

from shmsched.dataplane.layouts import StepStatus
from shmsched.wire import frames

from support.world import World

DONE, DEFERRED, FAILED = StepStatus.DONE, StepStatus.DEFERRED, StepStatus.FAILED
STOP = 7
"""The token that ends each."""


class Generations:
    """A client with sessions 1 and 2 that generate, and their engine, which has been given a batch and what follows it.

    The world's daemon has an ``ahead_share`` of 0: what comes after a batch is given at once.
    """

    def __init__(self, world: World, further: tuple[int, ...] = (8, 8), step_s: float = 0.0) -> None:
        """``step_s``: what a batch takes by the daemon's clock."""
        self.world = world
        self.step_s = step_s
        world.begin()
        self.client, self.engine = world.clients[0], world.engines[0]
        self.open_session(2)
        self.submit(*((i + 1, 0, n) for i, n in enumerate(further)))

    def open_session(self, session: int) -> None:
        """Of the client; the engine opens it."""
        self.world.open_session(self.client, self.engine, session)

    def submit(self, *steps: tuple[int, int, int]) -> None:
        """Decodes: of which session, where, and how many may follow."""
        described = [
            self.client.step(position, session=session, further=further, n_stop_tokens=further > 0)
            for session, position, further in steps
        ]
        self.client.submit_unread(*described, stop_tokens=(STOP,) * sum(further > 0 for _, _, further in steps))
        self.world.turn()

    def submit_chunks(self, session: int, chunks: list[tuple[int, int, int, bool]]) -> None:
        """Of one session: where, how many tokens, how many rows of output, and whether more of the submission follows."""
        self.client.submit_unread(
            *(self.client.step(at, n, session=session, rows=rows, more=more) for at, n, rows, more in chunks)
        )
        self.world.turn()

    def given(self, batch: int) -> list[tuple[int, int, int]]:
        """Slot, position and token of each step of the batch; where it follows another, a place in the place of the token."""
        slots = self.engine.slots
        return [(e.slot, e.position, token) for e, token in zip(slots.steps(batch), slots.tokens(batch), strict=True)]

    def answer(self, batch: int, *steps: tuple[StepStatus, int]) -> None:
        """A status and a token for each step."""
        assert self.engine.batches.pop(0) == batch
        self.world.clock.advance(self.step_s)
        self.engine.answer(batch, [status for status, _ in steps], [token for _, token in steps])
        self._turn()

    def say(self, message: frames.BatchFailed | frames.Skipped) -> None:
        assert self.engine.batches.pop(0) == message.batch
        self.engine.say(message)
        self._turn()

    def _turn(self) -> None:
        self.world.turn()
        self.world.check()

    @property
    def states(self) -> dict[str, int]:
        counts = self.world.daemon.core.ledger.counts()
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

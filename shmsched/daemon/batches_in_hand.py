"""What an engine has been given and has not answered: the batch that it runs, and perhaps the one that it goes on with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shmsched import failpoints
from shmsched.daemon.batch_in_flight import BatchInFlight, Following
from shmsched.daemon.batch_slot import Answers, BatchSlot
from shmsched.daemon.state import Step
from shmsched.dataplane.layouts import BatchSlotLayout
from shmsched.dataplane.step import StepState
from shmsched.scheduling import SchedulerParams

if TYPE_CHECKING:
    from shmsched.daemon.client_link import ClientLink

BATCH_SLOTS = 2
"""One for the batch that runs, one for what follows it. Both are in hand together and numbered one after the other, so batch ``n``
has slot ``n % 2``: nothing is written into a slot before the engine has answered what was there."""
IN_FLIGHT = StepState.IN_FLIGHT


class BatchesInHand:
    """The batches of one incarnation of an engine, numbered from 1 on. ``buffer``: its segment."""

    def __init__(self, buffer: memoryview, limits: SchedulerParams, vocab_size: int) -> None:
        size = BatchSlotLayout(limits.max_batch_size).size
        self._slots = [BatchSlot(buffer[i * size : (i + 1) * size], limits, vocab_size) for i in range(BATCH_SLOTS)]
        self._most_decodes = limits.max_decode_sequences
        self.running: BatchInFlight | None = None
        self.following: Following | None = None
        """Only while one runs."""
        self.given = self.given_ahead = 0
        """How many batches so far, and how many of these while another one ran."""

    def give(self, now: float, steps: list[Step]) -> BatchInFlight | None:
        """The steps, if there are any, are the engine's batch from here on; it has none. If this raises, they are not."""
        if not steps:
            return None
        number = self.given + 1
        batch = BatchInFlight(number, steps, now)
        batch.lengths = self._slot(number).write(number, steps)
        failpoints.hit("daemon.batch.written")
        self.given, self.running = number, batch
        return batch

    def give_ahead(self, batch: BatchInFlight) -> int | None:
        """What comes after the batch that runs, of generations alone, is the engine's from here on. Returns its number; None if
        something follows already, or all end with this batch, or a client does not keep up."""
        if self.following is not None:
            return None
        after: list[int] = []
        steps: list[Step] = []
        deadline = math.inf
        rooms: dict[ClientLink, int] = {}
        for k, step in enumerate(batch.steps):
            wanted = step.wanted
            assert wanted.generation is not None
            # A step that has been settled meanwhile may be of a client that is gone.
            if wanted.generation.further and step.state is IN_FLIGHT:
                client = step.session.client
                room = rooms.get(client, -1)
                if room < 0:
                    room = client.stream_room
                if room == 0:
                    # The step that follows will wait for its client; run now, it would be run twice.
                    return None
                rooms[client] = room - 1
                after.append(k)
                steps.append(step)
                if wanted.deadline:
                    deadline = min(deadline, wanted.deadline)
        # Chunks of prompts are followed by decodes, of which a batch may hold fewer.
        if not 0 < len(steps) <= self._most_decodes:
            return None
        self.given = number = self.given + 1
        self.given_ahead += 1
        self.following = Following(number, after, [step.session for step in steps], deadline)
        self._slot(number).write_following(
            number, steps, after if batch.places is None else [batch.places[k] for k in after]
        )
        failpoints.hit("daemon.follow.written")
        return number

    def take_back(self, number: int) -> BatchInFlight | None:
        """The engine has answered batch ``number``. None if it does not run that one."""
        batch = self.running
        if batch is None or batch.number != number:
            return None
        self.running = None
        return batch

    def put_back(self, batch: BatchInFlight) -> None:
        """What the engine has answered could not be settled to the end."""
        if self.running is None:
            self.running = batch

    def read(self, batch: BatchInFlight, messages: Sequence[str]) -> tuple[Answers, bool]:
        """The answers to the steps, and whether all that the engine was given was done. Raises ValueError if they do not fit."""
        answers = self._slot(batch.number).read(batch.size, batch.answers, messages)
        all_done = answers.all_done
        return (answers if batch.places is None else answers.of(batch.places)), all_done

    def go_on(self, followers: Sequence[Step | None], now: float) -> list[Step]:
        """A batch has ended, and the engine has begun what follows it, with ``followers``: what comes after each step of that one,
        or nothing where the engine skips it. Returns those that it runs."""
        assert self.following is not None
        self.running = self.following.begin(followers, now)
        self.following = None
        return self.running.steps

    def clear(self) -> BatchInFlight | None:
        """The engine is dead. Returns what it ran; its memory may go."""
        batch, self.running, self.following = self.running, None, None
        self._slots.clear()
        return batch

    def _slot(self, batch: int) -> BatchSlot:
        return self._slots[batch % BATCH_SLOTS]

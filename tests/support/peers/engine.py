"""An engine that says what a test tells it to, and the memory in which it finds its batches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmsched.dataplane.layouts import HEADER, STEP, BatchSlotLayout, StepEntry, StepStatus
from shmsched.memory.segment import Segment
from shmsched.scheduling import SchedulerParams
from shmsched.wire import frames

from support.peers.connection import Stranger, hello

VOCAB = 10
HONEST_OFFER = frames.Offer(VOCAB, 4, 40, 0, 0, 0, True, True, "m", "", (), "by hand")


class BatchSlots:
    """What the daemon has written for an engine, and where its answers go."""

    def __init__(self, attached: frames.Attached, fd: int) -> None:
        """``fd``: of the segment; it is closed."""
        self.layout = BatchSlotLayout(
            SchedulerParams(attached.max_decode_sequences, attached.max_prefill_chunk_size).max_batch_size
        )
        self.n = attached.slots
        segment = Segment(fd, self.layout.size * self.n)
        segment.close_descriptor()
        self.memory = segment.buffer

    def at(self, batch: int) -> int:
        """Where the batch begins."""
        return self.layout.size * (batch % self.n)

    def header(self, batch: int) -> tuple[int, int, int]:
        """The number of the batch that lies there, its steps and its tokens; as many as there is room for, whatever it says."""
        number, n_steps, n_tokens = HEADER.unpack_from(self.memory, self.at(batch))
        most = self.layout.max_tokens
        return number, min(n_steps, most), min(n_tokens, most)

    def steps(self, batch: int) -> list[StepEntry]:
        number, n, _ = self.header(batch)
        assert number == batch
        table = self.memory[self.at(batch) + self.layout.steps_offset :][: STEP.size * n]
        return [StepEntry._make(row) for row in STEP.iter_unpack(table)]

    def tokens(self, batch: int) -> list[int]:
        """Of each step; where the batch follows another, places in the place of tokens."""
        _, _, n = self.header(batch)
        return np.frombuffer(self.memory, np.int32, n, self.at(batch) + self.layout.tokens_offset).tolist()

    def statuses(self, batch: int) -> npt.NDArray[np.uint8]:
        """Where one for each step goes."""
        at = self.at(batch) + self.layout.statuses_offset
        return np.frombuffer(self.memory, np.uint8, self.layout.max_tokens, at)

    def ids(self, batch: int) -> npt.NDArray[np.int32]:
        """Where one for each sampled row goes."""
        at = self.at(batch) + self.layout.ids_offset
        return np.frombuffer(self.memory, np.int32, self.layout.max_tokens, at)

    def put(self, batch: int, statuses: Sequence[int], tokens: Sequence[int] = ()) -> None:
        self.statuses(batch)[: len(statuses)] = statuses
        self.ids(batch)[: len(tokens)] = tokens


class EnginePeer(Stranger):
    """Keeps what it was asked."""

    slots: BatchSlots

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.openings: list[tuple[int, int]] = []
        """Slots and numbers of sessions that it was asked to open."""
        self.batches: list[int] = []
        self.last_batch = 0
        self.say(hello(frames.Role.ENGINE))

    def heard(self, message: Any) -> None:
        match message:
            case frames.Attached():
                self.slots = BatchSlots(message, self.descriptor())
                self.memory = self.slots.memory
            case frames.OpenSlot(slot, session) | frames.ForkSlot(slot, session):
                self.openings.append((slot, session))
            case frames.AttachArena():
                os.close(self.descriptor())
            case frames.Work(batch) | frames.Follow(batch):
                self.batches.append(batch)
                self.last_batch = batch

    def close(self) -> None:
        if self.memory is not None:
            # A mapping that lives has a descriptor of its own.
            del self.slots
        super().close()

    def open_next(self) -> None:
        """It has opened the session that it was asked for last."""
        self.say(frames.SlotOpened(*self.openings.pop()))

    def answer(self, batch: int, statuses: Sequence[StepStatus], tokens: Sequence[int] = ()) -> None:
        """A status for each step, and a token for each sampled row."""
        self.slots.put(batch, statuses, tokens)
        self.say(frames.Done(batch, ("no",) * sum(status == StepStatus.FAILED for status in statuses)))

    def give(self, batch: int, status: StepStatus) -> None:
        """The same of each step of the batch."""
        _, n, _ = self.slots.header(batch)
        self.answer(batch, [status] * n)

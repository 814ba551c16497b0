"""An engine in the test's own process that speaks the protocol frame by frame, so that it can say what no host would."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shmsched.dataplane.dtypes import LOGIT, STEP_DTYPE
from shmsched.dataplane.layouts import HEADER, BatchSlotLayout, StepEntry, StepStatus
from shmsched.memory.segment import Segment
from shmsched.scheduling import SchedulerParams
from shmsched.wire import frames
from shmsched.wire.link import Link

VOCAB = 1000
DEADLINE = 30.0


class EngineByHand:
    """Opens every session it is asked to; a batch waits in ``work()`` until the test answers it."""

    def __init__(self, socket: Path, link: Link | None = None) -> None:
        self.link = link or Link.connect(socket, frames.Role.ENGINE)
        self.number = 0
        """The daemon's number for this engine."""
        self.arenas: dict[int, npt.NDArray[np.float32]] = {}
        self._work: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.at = 0
        """Where the slot of the batch that ``work`` gave last begins."""
        self._begins: dict[int, int] = {}
        self.attached = threading.Event()
        self.link.send(frames.Offer(VOCAB, 8, 1000, 0, 0, 0, True, False, "echo", "", (), "by hand"))
        self._reader = threading.Thread(target=self._read, name="engine-by-hand")
        self._reader.start()
        assert self.attached.wait(DEADLINE), f"waited {DEADLINE:g} s in vain for the daemon to attach the engine"

    def send(self, message: Any) -> None:
        self.link.send(message)

    def work(self) -> int:
        """The number of the next batch. Fails if none comes."""
        try:
            batch, slot = self._work.get(timeout=DEADLINE)
        except queue.Empty:
            raise AssertionError(f"waited {DEADLINE:g} s in vain for a batch") from None
        self.at = self._begins[batch] = self._layout.size * slot
        return batch

    def steps(self, batch: int = 0) -> list[StepEntry]:
        """What the batch asks for, or the one that ``work`` gave last."""
        at = self._begins.get(batch, self.at)
        _, n, _ = HEADER.unpack_from(self._buffer, at)
        rows = np.frombuffer(self._buffer, STEP_DTYPE, n, at + self._layout.steps_offset)
        return [StepEntry._make(row) for row in rows.tolist()]

    def row(self, step: StepEntry) -> npt.NDArray[np.float32]:
        """Where the raw logits of a step go."""
        at = step.rows_offset // LOGIT.itemsize
        return self.arenas[step.client][at : at + VOCAB]

    def answer(self, batch: int, *tokens: int) -> None:
        """Every step of the batch is done; ``tokens`` are those of the sampled rows."""
        at = self._begins.get(batch, self.at) + self._layout.ids_offset
        np.frombuffer(self._buffer, np.int32, len(tokens), at)[:] = tokens
        self.answer_by(batch, [StepStatus.DONE] * len(self.steps(batch)))

    def answer_by(self, batch: int, statuses: list[StepStatus]) -> None:
        """One status for each step of the batch, none of them FAILED."""
        at = self._begins.get(batch, self.at) + self._layout.statuses_offset
        np.frombuffer(self._buffer, np.uint8, len(statuses), at)[:] = statuses
        self.send(frames.Done(batch, ()))

    def close(self) -> None:
        self.link.shutdown()
        self._reader.join(DEADLINE)
        self.link.close()

    def __enter__(self) -> EngineByHand:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        while (arrived := self.link.receive()) is not None:
            for message in arrived:
                match message:
                    case frames.Attached():
                        self.number = message.engine
                        limits = SchedulerParams(message.max_decode_sequences, message.max_prefill_chunk_size)
                        self._layout = BatchSlotLayout(limits.max_batch_size)
                        self._buffer = self._map(self._layout.size * message.slots)
                        self.send(frames.Ready(0.0))
                        self.attached.set()
                    case frames.OpenSlot(slot, session, _):
                        self.send(frames.SlotOpened(slot, session))
                    case frames.AttachArena(client, size):
                        self.arenas[client] = np.frombuffer(self._map(size), LOGIT)
                    case frames.Work(batch, slot) | frames.Follow(batch, slot):
                        self._work.put((batch, slot))

    def _map(self, size: int) -> Any:
        segment = Segment(self.link.descriptor(), size)
        segment.close_descriptor()
        return segment.buffer

"""The scheduler's side of an engine's host, played by hand over a real connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from shmsched.dataplane.layouts import HEADER, STEP, BatchSlotLayout
from shmsched.engine import Engine, Limits
from shmsched.engine.host import EngineHost
from shmsched.errors import ShmschedError
from shmsched.memory.segment import Segment
from shmsched.params import OutputRows
from shmsched.wire import frames
from shmsched.wire.link import Link
from shmsched.wire.peer import Peer

from processes.leftovers import wait_until
from support.peers.client import GREEDY

LIMITS = Limits(8, 16)
LAYOUT = BatchSlotLayout(LIMITS.max_batch_size)
UNTOUCHED = 99


class Step(NamedTuple):
    slot: int
    position: int
    tokens: Sequence[int]
    rows: OutputRows = OutputRows.LAST
    sampled: bool = True
    client: int = 0
    offset: int = 0


class Scheduler:
    """The other end: hands out the segment, writes batches into its slots in turn, and reads results from there."""

    def __init__(self, engine: Engine) -> None:
        ours, theirs = socket.socketpair()
        self.peer = Peer(ours)
        self.link = Link(Connection(theirs.detach()))
        self.arrived: list[Any] = []
        self.error: ShmschedError | None = None
        self.segment = Segment.create(2 * LAYOUT.size, "a test")
        self.batch = 0
        self._host = EngineHost(engine, self.link, "test-spec")
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._host.run()
        except ShmschedError as e:
            self.error = e
        finally:
            self.link.close()

    def say(self, message: Any, fd: int = -1) -> None:
        self.peer.send(message, fd)
        assert self.peer.flush()

    def hear(self, kind: type[Any]) -> Any:
        """The next frame, which must be of this kind."""
        wait_until(lambda: self.arrived or self.arrived.extend(self.peer.read() or []), f"a {kind.__name__} frame")
        message = self.arrived.pop(0)
        assert isinstance(message, kind), message
        return message

    def start(self) -> frames.Offer:
        offer: frames.Offer = self.hear(frames.Offer)
        self.say(frames.Attached(1, LIMITS.max_decode_sequences, LIMITS.max_prefill_chunk_size, 2), self.segment.fd)
        self.hear(frames.Ready)
        return offer

    def open(self, slot: int, options: bytes = b"") -> None:
        self.say(frames.OpenSlot(slot, 1000 + slot, options))
        assert self.hear(frames.SlotOpened) == frames.SlotOpened(slot, 1000 + slot)

    def write(self, steps: Sequence[Step]) -> None:
        self.batch += 1
        buffer, start, at = self.segment.buffer, 0, self.at
        for i, s in enumerate(steps):
            n = len(s.tokens)
            STEP.pack_into(
                buffer, at + LAYOUT.steps_offset + i * STEP.size,
                s.slot, start, n, s.position, s.rows, s.sampled, GREEDY, s.client, s.offset,
            )  # fmt: skip
            np.frombuffer(buffer, np.int32, n, at + LAYOUT.tokens_offset + 4 * start)[:] = s.tokens
            start += n
        HEADER.pack_into(buffer, at, self.batch, len(steps), start)
        at += LAYOUT.statuses_offset
        buffer[at : at + len(steps)] = bytes([UNTOUCHED]) * len(steps)

    @property
    def slot(self) -> int:
        """Of the batch that was written last."""
        return self.batch % 2

    @property
    def at(self) -> int:
        """Where that slot begins."""
        return LAYOUT.size * self.slot

    def run(self, *steps: Step) -> tuple[list[int], list[int], list[str]]:
        """Statuses of the steps, sampled tokens of all rows, messages of the steps that failed."""
        self.write(steps)
        self.say(frames.Work(self.batch, self.slot))
        return self.hear_results(steps)

    def follow(self, *steps: Step) -> None:
        """Have the host go on with these after the last batch: their tokens are places there."""
        self.write(steps)
        self.say(frames.Follow(self.batch, self.slot, self.batch - 1))

    def hear_results(self, steps: Sequence[Step]) -> tuple[list[int], list[int], list[str]]:
        """Of the last batch."""
        done = self.hear(frames.Done)
        assert done.batch == self.batch
        n_rows = sum(s.rows.count(len(s.tokens)) for s in steps if s.sampled)
        return (
            list(self.segment.buffer[self.at + LAYOUT.statuses_offset :][: len(steps)]),
            np.frombuffer(self.segment.buffer, np.int32, n_rows, self.at + LAYOUT.ids_offset).tolist(),
            list(done.messages),
        )

    def end(self) -> None:
        self.peer.close()
        self.thread.join(10)
        assert not self.thread.is_alive(), "the host goes on without a scheduler"
        self.segment.close_descriptor()

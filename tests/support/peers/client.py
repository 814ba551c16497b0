"""A client that says what a test tells it to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from shmsched.dataplane.layouts import SAMPLING, ClientLayout
from shmsched.memory.segment import Segment
from shmsched.wire import frames
from shmsched.wire.frames import StepDescriptor, StepFlags

from support.peers.connection import Stranger, hello

GREEDY = SAMPLING.pack(0, 0.0, 1.0, 0)


class ClientPeer(Stranger):
    """Keeps the cursors of its rings and the positions of its sessions, or it could not lie about them."""

    def __init__(self, path: str, now: Callable[[], float] = time.monotonic) -> None:
        """``now``: the daemon's clock."""
        super().__init__(path)
        self.now = now
        self.say(hello(frames.Role.CLIENT))
        self.positions: dict[int, int] = {}
        self.request = 0
        self.tokens = 0
        self.cursors = (0, 0, 0)
        """Records, results and streamed tokens written by the daemon, as it last said."""
        self.failures: list[frames.Failed] = []
        """What it was told of steps that failed."""

    def heard(self, message: Any) -> None:
        match message:
            case frames.Welcome():
                layout = ClientLayout(message.ring_tokens, message.records, message.results, message.stream)
                segment = Segment(self.descriptor(), layout.size)
                segment.close_descriptor()
                self.memory = segment.buffer
            case frames.SessionOpened(session):
                self.positions[session] = 0
            case frames.SessionEnded(session) | frames.SessionRefused(session):
                self.positions.pop(session, None)
            case frames.Completions(records, results, stream):
                self.cursors = (records, results, stream)
            case frames.Failed():
                self.failures.append(message)
            case frames.Arena():
                os.close(self.descriptor())

    def step(
        self,
        position: int = 0,
        n_tokens: int = 1,
        *,
        session: int = 1,
        rows: int = 1,
        more: bool = False,
        further: int = 0,
        n_stop_tokens: int = 0,
        deadline: float = 0.0,
    ) -> StepDescriptor:
        """The next step, sampled; its tokens are what lies in the ring."""
        self.request += 1
        self.tokens += n_tokens
        flags = StepFlags.SAMPLED | (StepFlags.MORE if more else 0)
        return StepDescriptor(
            self.request, session, n_tokens, position, rows, flags, GREEDY, 0, further, n_stop_tokens, deadline
        )

    def submit(
        self,
        *steps: StepDescriptor,
        stop_tokens: tuple[int, ...] = (),
        tokens_written: int | None = None,
        cursors: tuple[int, int, int] | None = None,
    ) -> None:
        """One frame. What is not given is the truth, and all that was written for it has been read."""
        written = self.tokens if tokens_written is None else tokens_written
        self.say(frames.Submit(written, *(cursors or self.cursors), list(steps), stop_tokens))

    def submit_unread(self, *steps: StepDescriptor, stop_tokens: tuple[int, ...] = ()) -> None:
        """By one that reads no token of its generations."""
        self.submit(*steps, stop_tokens=stop_tokens, cursors=(*self.cursors[:2], 0))

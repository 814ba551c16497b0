"""Peers that know what would be right to say, and say something else now and then."""

from __future__ import annotations

import numpy as np

from shmsched.dataplane.layouts import SAMPLING, StepStatus
from shmsched.wire import frames

from fuzz.choices import Choices, one_of, true_or
from support.peers.client import ClientPeer
from support.peers.engine import HONEST_OFFER, VOCAB, EnginePeer

U32, U64 = 2**32 - 1, 2**64 - 1
MODELS = ("", "m", "n", "nobody's")


class LyingClient(ClientPeer):
    def _session(self, c: Choices) -> int:
        mine = list(self.positions)
        return true_or(c, one_of(c, mine or (1,)), 1, 2, 7, 0, U64)

    def scribble(self, c: Choices) -> None:
        """Write anywhere into the segment: completions too, and tokens that were sent long ago."""
        if self.memory is not None:
            data = c.some_bytes(64)
            at = c.below(len(self.memory) - len(data))
            self.memory[at : at + len(data)] = data

    def open_session(self, c: Choices) -> None:
        options = b"o" * true_or(c, 0, 3, 65536, 65537)
        new = next(i for i in range(1, 99) if i not in self.positions)
        session = true_or(c, new, 1, 2, 7, U64)
        self.say(frames.OpenSession(session, c.below(2), true_or(c, "m", *MODELS), options))

    def fork_session(self, c: Choices) -> None:
        length = one_of(c, (0, 1, 3, U32))
        parent = self._session(c)
        self.say(
            frames.ForkSession(
                true_or(c, next(i for i in range(1, 99) if i not in self.positions), 1, 2, U64), parent, length
            )
        )

    def close_session(self, c: Choices) -> None:
        session = self._session(c)
        self.positions.pop(session, None)
        self.say(frames.CloseSession(session))

    def cancel(self, c: Choices) -> None:
        session = self._session(c)
        position = true_or(c, self.positions.get(session, 0), 0, 1, U32)
        request = one_of(c, (0, 1, self.request, max(0, self.request - 1), self.request + 1, U64))
        if session in self.positions:
            self.positions[session] = min(self.positions[session], position)
        self.say(frames.Cancel(session, request, position))

    def halt(self, c: Choices) -> None:
        self.say(frames.Halt(self._session(c), true_or(c, self.request, 0, 1, U64)))

    def consumed(self, c: Choices) -> None:
        records, results, stream = self.cursors
        said = frames.Consumed(
            true_or(c, records, U64, records + 1), true_or(c, results, U64), true_or(c, stream, 0, stream + 1, U64)
        )
        self.say(said)

    def open_arena(self, c: Choices) -> None:
        self.say(frames.OpenArena(true_or(c, 4096, 1 << 14, 1, 0, (1 << 14) + 1, U64)))

    def submit_any(self, c: Choices) -> None:
        if not self.positions and c.below(8):
            self.open_session(c)
            return
        descriptors = []
        stop_tokens: list[int] = []
        n_tokens = 0
        for _ in range(true_or(c, one_of(c, (1, 1, 2, 3)), 9)):
            d = self._any_step(c)
            descriptors.append(d)
            stop_tokens += [one_of(c, (1, 2, VOCAB, U32)) for _ in range(d.n_stop_tokens)]
            n_tokens += min(d.n_tokens, 64)
        if self.memory is not None and c.below(2):
            tokens = np.frombuffer(self.memory, np.int32, 64)
            for i in range(n_tokens):
                tokens[(self.tokens + i) % 64] = (
                    one_of(c, (1, 2, 3, 9, VOCAB, -1)) if c.below(4) == 0 else c.below(VOCAB)
                )
        self.tokens += n_tokens
        records, results, stream = self.cursors
        written = true_or(c, self.tokens, self.tokens + 1, 0, U64)
        said = (
            true_or(c, records, records + 1, U64),
            true_or(c, results, U64),
            true_or(c, stream, stream + 1, 0, U64),
        )
        stops = true_or(c, tuple(stop_tokens), (1,))
        self.submit(*descriptors, stop_tokens=stops, tokens_written=written, cursors=said)

    def _any_step(self, c: Choices) -> frames.StepDescriptor:
        session = self._session(c)
        self.request += true_or(c, 1, 0, 100)
        n_tokens = one_of(c, (1, 1, 1, 2, 4, 5, 0))
        position = true_or(c, self.positions.get(session, 0), 0, 1, 17, U32)
        further = one_of(c, (0, 0, 1, 2, 7, U32))
        if session in self.positions:
            self.positions[session] = min(U32, position + n_tokens)
        return frames.StepDescriptor(
            self.request,
            session,
            n_tokens,
            position,
            1 if further else one_of(c, (0, 1, 1, 2, 3, 255)),
            true_or(c, frames.StepFlags.SAMPLED, 0, 2, 3, 255),
            SAMPLING.pack(
                true_or(c, 0, 3, U32),
                true_or(c, 0.0, 0.5, -1.0, float("nan"), float("inf")),
                true_or(c, 1.0, 0.5, 0.0, float("nan")),
                true_or(c, 0, U64),
            ),
            true_or(c, 0, 40, 3, (1 << 14) - 40, 1 << 14, U64),
            further,
            true_or(c, 0, 1, 2, 17),
            true_or(
                c,
                0.0,
                1.0,
                -1.0,
                self.now() + 0.001,
                self.now() + 3600,
                1e308,
                *map(float, ("nan", "inf", "-inf")),
            ),
        )


class LyingEngine(EnginePeer):
    """Answers what it is asked, or something else, or twice."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.opened: list[tuple[int, int]] = []

    def offer(self, c: Choices) -> None:
        if self.memory is not None and c.below(16):
            # It has made one, and was taken.
            return
        if c.below(4):
            self.say(HONEST_OFFER)
            return
        self.say(
            frames.Offer(
                true_or(c, VOCAB, VOCAB + 1, 0, 2**31, U32),
                true_or(c, 3, 1, 0, 2**31 - 1, U32),
                true_or(c, 20, 1, 2**31 - 1, U32),
                true_or(c, 0, 3, 1, U32),
                true_or(c, 0, 1, U32),
                true_or(c, 0, 1, 2**31, U32),
                c.below(2),
                c.below(2),
                true_or(c, one_of(c, ("m", "n")), "", "x" * 255, "x" * 256),
                true_or(c, "", "bytes:", "t" * 65535),
                true_or(c, (), (1,), (VOCAB,), (U32,), (1,) * 20_000),
                "by hand",
            )
        )

    def start(self, c: Choices) -> None:
        if self.memory is None or c.below(8) == 0:
            self.say(true_or(c, frames.Ready(0.0), frames.StartFailed("no"), frames.Ready(float("nan"))))

    def answer_opening(self, c: Choices) -> None:
        if self.openings and c.below(8):
            slot, session = self.openings.pop(0)
            self.opened.append((slot, session))
        elif self.opened:
            slot, session = one_of(c, self.opened)
        else:
            slot, session = 0, 0
        slot, session = true_or(c, slot, slot + 1, U32), true_or(c, session, session + 1, 0, U64)
        if c.below(4):
            self.say(frames.SlotOpened(slot, session))
        else:
            self.say(frames.SlotRefused(slot, session, one_of(c, (1, 2, 5, 0, 65535)), "no " * one_of(c, (1, 9000))))

    def answer_any(self, c: Choices) -> None:
        if self.memory is None:
            self.offer(c)
            self.start(c)
        elif self.openings:
            self.answer_opening(c)
        else:
            self.answer_batch(c)

    def answer_batch(self, c: Choices) -> None:
        batch = self.batches.pop(0) if self.batches and c.below(8) else true_or(c, self.last_batch, 0, U64)
        if self.memory is None:
            self.say(frames.Done(batch, ()))
            return
        _, n, n_tokens = self.slots.header(batch)
        statuses, ids = self.slots.statuses(batch), self.slots.ids(batch)
        failed = 0
        for i in range(n):
            statuses[i] = true_or(c, StepStatus.DONE, StepStatus.DEFERRED, StepStatus.FAILED, 0, 255)
            failed += int(statuses[i] == StepStatus.FAILED)
        for i in range(n_tokens):
            ids[i] = true_or(c, c.below(VOCAB), VOCAB, -1, 2**31 - 1)
        match c.below(14):
            case 0:
                self.say(frames.BatchFailed(batch, "raised"))
            case 2:
                self.say(frames.Skipped(batch))
            case 1:
                self.say(frames.Done(batch, ("why",) * (failed + 1)))
            case _:
                self.say(frames.Done(batch, ("why",) * failed))

    def defer_all(self, c: Choices) -> None:
        if self.memory is not None and self.batches:
            self.give(self.batches.pop(0), StepStatus.DEFERRED)

    def scribble(self, c: Choices) -> None:
        """What the daemon wrote for it: steps, tokens, header."""
        if self.memory is not None:
            data = c.some_bytes(64)
            at = c.below(len(self.memory) - len(data))
            self.memory[at : at + len(data)] = data

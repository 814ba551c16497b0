"""A batch in its engine's host: pulled out of the segment, run in forward passes, and what became of it put back.

In a pass each session has one row. Nearly every batch is one pass as it stands: each step is of a session of its own, and goes on
where that ends. Otherwise chunks of a session that continue one another become one row, and one that does not (it rewinds) waits until
the row before it has run: for a second pass.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from shmsched import failpoints
from shmsched.dataplane.layouts import HEADER, SAMPLING, STEP, BatchSlotLayout, StepStatus
from shmsched.errors import ProtocolError
from shmsched.not_copied import not_copied
from shmsched.params import OutputRows

_U32S, _U64S = STEP.size // 4, STEP.size // 8
"""A step in words of either size: every ``_U32S``-th word from the 4th on is the position of a step."""
_SAMPLING_AT, _SAMPLING_SIZE = 20, SAMPLING.size
_ALL_ROWS = int(OutputRows.ALL)
_SAMPLED = 1 << 16
_ONE_ROW = frozenset((1, 1 | _SAMPLED))
_RAW = frozenset((1, _ALL_ROWS))
_DONE = int(StepStatus.DONE)
_ALL_DONE = bytes([_DONE])
_NO_TOKEN = b"\xff\xff\xff\xff"

Places = tuple[Sequence[int], Sequence[int], Sequence[int]]


class EngineSlot:
    """One batch slot of the engine's segment, as the host reads and writes it."""

    __slots__ = ("buffer", "ids_offset", "logprobs_offset", "statuses_offset", "steps_offset", "tokens")
    __reduce__ = not_copied

    def __init__(self, buffer: memoryview, layout: BatchSlotLayout) -> None:
        self.buffer = buffer
        self.steps_offset = layout.steps_offset
        self.statuses_offset = layout.statuses_offset
        self.ids_offset = layout.ids_offset
        self.logprobs_offset = layout.logprobs_offset
        self.tokens: Any = np.frombuffer(buffer, np.int32, layout.max_tokens, layout.tokens_offset)

    def pull(self, number: int) -> Batch:
        """The batch of this number. Raises ProtocolError if the slot holds none such."""
        batch, n_steps, n_tokens = HEADER.unpack_from(self.buffer)
        if batch != number or not 0 < n_steps <= n_tokens <= len(self.tokens):
            raise ProtocolError(
                f"told to run batch {number}, but the slot holds batch {batch}: {n_steps} steps, {n_tokens} tokens"
            )
        at = self.steps_offset
        pulled = Batch(bytes(self.buffer[at : at + STEP.size * n_steps]), self.tokens[:n_tokens])
        failpoints.hit("engine.batch.pulled")
        return pulled

    def put(self, outcome: Outcome) -> None:
        """Write what became of that batch."""
        buffer, n = self.buffer, len(outcome.ids)
        buffer[self.statuses_offset : self.statuses_offset + outcome.batch.n] = outcome.statuses
        buffer[self.ids_offset : self.ids_offset + n] = outcome.ids
        buffer[self.logprobs_offset : self.logprobs_offset + n] = outcome.logprobs


class Batch:
    """A batch out of its slot: its steps, copied, by column; its tokens lie where they lay."""

    __slots__ = ("each_has_one", "lengths", "n", "n_rows", "packed", "places", "positions", "raw", "slots", "tokens")
    __reduce__ = not_copied

    def __init__(self, packed: bytes, tokens: Any) -> None:
        """``packed``: the steps as STEP packs them, one after the other."""
        words = memoryview(packed).cast("I")
        n = len(words) // _U32S
        # ``output_rows`` in the lower 16 bits, ``sampled`` in the upper ones.
        kinds = words[4::_U32S].tolist()
        there = frozenset(kinds)
        self.n, self.packed, self.tokens = n, packed, tokens
        self.slots: list[int] = words[0::_U32S].tolist()
        self.positions: list[int] = words[3::_U32S].tolist()
        # Each step has a token at least.
        self.lengths: list[int] = [1] * n if len(tokens) == n else words[2::_U32S].tolist()
        self.n_rows = [1] * n
        """How many output rows each step has."""
        self.each_has_one = there <= _ONE_ROW
        if not self.each_has_one:
            self.n_rows = [self.lengths[i] if kinds[i] & _ALL_ROWS else kinds[i] & 1 for i in range(n)]
        self.raw: frozenset[int] = frozenset()
        """The steps whose rows go to their clients' arenas."""
        self.places: list[tuple[int, int]] = []
        """Where the rows of each of these lie, if there is one: the client whose arena it is, and ``rows_offset`` there."""
        if not there.isdisjoint(_RAW):
            self.raw = frozenset([i for i in range(n) if kinds[i] in _RAW])
            longs = memoryview(packed).cast("Q")
            self.places = list(zip(longs[5::_U64S].tolist(), longs[6::_U64S].tolist(), strict=True))

    def follow(self, ids: bytes) -> None:
        """Take the batch's tokens from those sampled in the batch that it follows, int32: so far they name places there.
        Raises ProtocolError for a place that is none."""
        sampled, places = memoryview(ids).cast("i"), self.tokens.tolist()
        if not (min(places) >= 0 and max(places) < len(sampled)):
            raise ProtocolError(f"a batch follows one of {len(sampled)} sampled tokens, and asks for numbers {places}")
        self.tokens = np.array([sampled[place] for place in places], np.int32)

    def is_one_pass(self, held: Mapping[int, int]) -> bool:
        """Whether it is one pass as it stands. ``held``: the length of the session in each slot."""
        return len(set(self.slots)) == self.n and list(map(held.get, self.slots)) == self.positions

    def passes(self, left_out: Container[int]) -> list[list[list[int]]]:
        """The steps of each row of each pass, in the order in which sessions first appear. ``left_out``: steps that are not run."""
        plan: list[list[list[int]]] = []
        latest: dict[int, tuple[int, int, list[int]]] = {}
        for i in range(self.n):
            if i in left_out:
                continue
            slot = self.slots[i]
            at, end, row = latest.get(slot, (-1, -1, []))
            if end != self.positions[i]:
                at, row = at + 1, []
                if at == len(plan):
                    plan.append([])
                plan[at].append(row)
            row.append(i)
            latest[slot] = at, self.positions[i] + self.lengths[i], row
        return plan

    def sampling(self) -> list[bytes]:
        """Of each step, as SAMPLING packs it."""
        packed = self.packed
        return [packed[at : at + _SAMPLING_SIZE] for at in range(_SAMPLING_AT, len(packed), STEP.size)]


class Pass:
    """Steps that run together, in this order. A row is one session's: one step, or several side by side."""

    __slots__ = ("batch", "lengths", "n_outputs", "places", "positions", "raw", "rows", "slots", "steps", "tokens")
    __reduce__ = not_copied

    def __init__(self, batch: Batch, rows: list[list[int]] | None) -> None:
        """``rows``: the steps of each. None: the batch is one pass as it stands."""
        self.batch = batch
        self.rows = rows
        self.places: Places | None = None
        if rows is None:
            self.steps: Sequence[int] = range(batch.n)
            self.slots, self.positions, self.lengths = batch.slots, batch.positions, batch.lengths
            self.tokens = batch.tokens
        else:
            self._pack(rows)
        self.n_outputs = len(self.steps) if batch.each_has_one else sum([batch.n_rows[i] for i in self.steps])
        self.raw: Sequence[int] = ()
        """The outputs that are not sampled."""
        if batch.raw:
            self.raw = [k for k, i in enumerate(self.outputs()[1]) if i in batch.raw]

    def _pack(self, rows: list[list[int]]) -> None:
        batch = self.batch
        steps = [i for row in rows for i in row]
        self.steps = steps
        self.slots = [batch.slots[row[0]] for row in rows]
        self.positions = [batch.positions[row[0]] for row in rows]
        self.lengths = [sum([batch.lengths[i] for i in row]) for row in rows]
        starts = list(accumulate(batch.lengths, initial=0))
        behind = steps[0] + len(steps)
        if steps == list(range(steps[0], behind)):
            self.tokens = batch.tokens[starts[steps[0]] : starts[behind]]
        else:
            self.tokens = np.concatenate([batch.tokens[starts[i] : starts[i + 1]] for i in steps])

    def outputs(self) -> Places:
        """Of each output: the index of its token, the step it belongs to, and which of that step's rows it is."""
        if self.places is None:
            self.places = self._lay_out()
        return self.places

    def _lay_out(self) -> Places:
        batch, end = self.batch, 0
        lengths = batch.lengths if self.rows is None else [batch.lengths[i] for i in self.steps]
        if batch.each_has_one:
            return [end - 1 for end in accumulate(lengths)], self.steps, bytes(len(lengths))
        tokens: list[int] = []
        owners: list[int] = []
        within: list[int] = []
        for at, i in enumerate(self.steps):
            end += lengths[at]
            n = batch.n_rows[i]
            if n == 1:
                tokens.append(end - 1)
                owners.append(i)
                within.append(0)
            elif n > 1:
                tokens.extend(range(end - n, end))
                owners.extend([i] * n)
                within.extend(range(n))
        return tokens, owners, within

    def steps_of(self, row: int) -> Sequence[int]:
        return (row,) if self.rows is None else self.rows[row]

    def advance(self, held: dict[int, int]) -> None:
        """Its sessions have its tokens now."""
        positions, lengths = self.positions, self.lengths
        for i, slot in enumerate(self.slots):
            held[slot] = positions[i] + lengths[i]


class Outcome:
    """What became of each step of a batch, until all of it is known: statuses, the tokens of its sampled rows in step order and their
    log-probabilities, and what is said of each step that failed."""

    __slots__ = ("batch", "ids", "logprobs", "messages", "statuses", "stopped")
    __reduce__ = not_copied

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.statuses = bytearray(batch.n)
        self.messages: dict[int, str] = {}
        self.stopped: dict[int, int] = {}
        """Of each session of which a row did not run, the first step of that. What comes later has nothing to stand on."""
        self.ids: bytes = b""
        self.logprobs: bytes = b""

    def done(self, this: Pass, ids: bytes, logprobs: bytes) -> None:
        """All steps of this pass. Its outputs have these tokens, int32, and log-probabilities, float32 (anything for a raw one)."""
        if this.raw:
            sampled = [4 * k for k, i in enumerate(this.outputs()[1]) if i not in self.batch.raw]
            ids = b"".join([ids[at : at + 4] for at in sampled])
            logprobs = b"".join([logprobs[at : at + 4] for at in sampled])
        if this.rows is None:
            self.statuses = bytearray(_ALL_DONE * self.batch.n)
            self.ids, self.logprobs = ids, logprobs
        else:
            self._note(this, ids, logprobs)

    def _note(self, this: Pass, ids: bytes, logprobs: bytes) -> None:
        batch = self.batch
        sizes = [0 if i in batch.raw else 4 * batch.n_rows[i] for i in range(batch.n)]
        places = list(accumulate(sizes, initial=0))
        my_ids = bytearray(self.ids or _NO_TOKEN * (sum(sizes) // 4))
        my_logprobs = bytearray(self.logprobs or sum(sizes))
        at = 0
        for i in this.steps:
            self.statuses[i] = _DONE
            place, size = places[i], sizes[i]
            my_ids[place : place + size] = ids[at : at + size]
            my_logprobs[place : place + size] = logprobs[at : at + size]
            at += size
        self.ids, self.logprobs = bytes(my_ids), bytes(my_logprobs)

    def settle(self, i: int, status: int, message: str | None) -> None:
        """A step is not done after all, or never was to be."""
        self.statuses[i] = status
        if message is not None:
            self.messages[i] = message

    def stop(self, slot: int, steps: Sequence[int], status: int, message: str | None) -> None:
        """These steps of the session in ``slot`` did not run, and no later one of it can."""
        self.stopped[slot] = steps[0]
        for i in steps:
            self.settle(i, status, message)

    def all_done(self) -> bool:
        return self.statuses.count(_DONE) == self.batch.n

    def said(self) -> tuple[str, ...]:
        """The messages, in the order of the steps."""
        return tuple([self.messages[i] for i in sorted(self.messages)]) if self.messages else ()

"""What an engine has been given and has not answered: the batch that it runs, and perhaps the one that it goes on with.

A batch is described in a slot of the engine's segment, and its results are read from there.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from shmsched import failpoints
from shmsched.dataplane.layouts import HEADER, BatchSlotLayout, StepStatus
from shmsched.dataplane.session import SPEC, Session, Step
from shmsched.dataplane.step import StepState
from shmsched.not_copied import not_copied

BATCH_SLOTS = 2
"""One for the batch that runs, one for what follows it. Both are in flight together and numbered one after the other, so batch ``n``
has slot ``n % 2``: nothing is written into a slot before the engine has answered what was there."""
IN_FLIGHT = StepState.IN_FLIGHT
DONE = int(StepStatus.DONE)
FAILURES = bytes([StepStatus.FAILED, StepStatus.NO_ARENA, StepStatus.SPOILT])
"""Each of these has a message."""
_STATUSES = {int(status) for status in StepStatus}
_ENTRY = struct.Struct(f"<IIII{SPEC.size}s")


class Batch:
    """Steps that an engine runs. ``number`` counts within this incarnation of the engine."""

    __slots__ = (
        "after", "answered", "came", "deadline", "followers", "generates", "given", "ids", "logprobs", "messages", "n_decodes",
        "n_results", "n_tokens", "number", "places", "raw", "size", "started", "statuses", "steps",
    )  # fmt: skip
    __reduce__ = not_copied

    def __init__(self, number: int, steps: list[Any], started: float) -> None:
        self.number = number
        self.steps = steps
        """Those whose answers count."""
        self.started = started
        self.size = len(steps)
        """How many steps the engine was given."""
        # What an engine is told to go on with once it has finished its batch: decodes, which are steps only from then on, if they
        # still are to come. Whose generation has ended meanwhile is in the engine's batch, and nothing comes of it.
        self.after: list[int] = []
        """Which steps of the batch before they come after."""
        self.deadline = math.inf
        """The first of theirs."""
        self.given: list[Session] | None = None
        """The sessions whose steps the engine was given, where some of them are none any more."""
        self.places: list[int] | None = None
        """Which of those that the engine was given the steps are; None for all."""
        self.n_tokens = self.n_decodes = 0
        self.n_results = 0
        """How many sampled tokens answer what the engine was given."""
        self.raw = False
        """Some step wants logits."""
        self.generates = True
        """Every step is of a generation, and has the one token that this goes on with."""
        # What became of the steps: a status for each, the sampled tokens of all of them in step order, and what is said of each
        # that failed.
        self.statuses = b""
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.messages: Sequence[str] = ()
        # How far the answers have been taken, and what came of them.
        self.answered = 0
        """Of the sampled tokens."""
        self.came: list[int] = []
        """The sessions that got a token and have nothing queued."""
        self.followers: dict[int, Step] = {}
        """The decodes that come after the steps, by these ones' places, where their generations go on now."""

    @property
    def sessions(self) -> list[Session]:
        """Those that the engine was given a step of."""
        return [step.session for step in self.steps] if self.given is None else self.given

    def begin(self, followers: dict[int, Step], now: float) -> None:
        """The batch before has ended, and the engine runs this one, with these ``followers`` of its steps."""
        after = self.after
        places = [place for place in range(len(after)) if after[place] in followers]
        self.steps = [followers[after[place]] for place in places]
        self.started = now
        self.n_tokens = self.n_decodes = len(places)
        if len(places) < self.size:
            self.places = places

    def n_results_of(self, at: int) -> int:
        """How many sampled tokens answer one of the steps that the engine was given."""
        return 1 if self.given is not None else self.steps[at].n_results

    def take_answers(self, statuses: bytes, ids: list[int], logprobs: list[float], messages: Sequence[str]) -> None:
        """What the engine has answered; of some of the steps, where only these count."""
        places = self.places
        if places is not None:
            # One token answers each, and each that failed has its message.
            said = iter(messages)
            all_said = {place: next(said) for place, status in enumerate(statuses) if status in FAILURES}
            messages = [all_said[place] for place in places if place in all_said]
            statuses = bytes([statuses[place] for place in places])
            ids = [ids[place] for place in places]
            logprobs = [logprobs[place] for place in places]
        self.statuses, self.ids, self.logprobs, self.messages = statuses, ids, logprobs, messages


class BatchSlot:
    """The scheduler's side of one batch slot. It belongs to the engine from Work to Done."""

    __slots__ = ("buffer", "ids", "logprobs", "statuses_at", "steps_at", "tokens_at", "vocab_size")
    __reduce__ = not_copied

    def __init__(self, buffer: memoryview, max_tokens: int, vocab_size: int) -> None:
        layout = BatchSlotLayout(max_tokens)
        n = layout.max_tokens
        self.vocab_size = vocab_size
        self.buffer = buffer
        self.steps_at, self.tokens_at, self.statuses_at = (
            layout.steps_offset,
            layout.tokens_offset,
            layout.statuses_offset,
        )
        # As memoryviews, of which a few are read in half the time that it takes with numpy.
        self.ids = buffer[layout.ids_offset :][: 4 * n].cast("i")
        self.logprobs = buffer[layout.logprobs_offset :][: 4 * n].cast("f")

    def write(self, batch: Batch) -> None:
        """Describe the batch."""
        pack, steps = _ENTRY.pack, batch.steps
        entries, tokens = [], []
        start = n_decodes = n_results = 0
        raw, generates = False, True
        for at in range(len(steps)):
            step: Step = steps[at]
            session, spec, n = step.session, step.spec, step.n_tokens
            entries.append(pack(session.slot, start, n, step.position, spec.entry))
            tokens.append(step.tokens)
            start += n
            if n == 1:
                n_decodes += 1
            if spec.sampled:
                n_results += step.n_rows
            elif step.n_rows > 0:
                raw = True
            if spec.generation is None:
                generates = False
        batch.n_tokens, batch.n_decodes, batch.n_results = start, n_decodes, n_results
        batch.raw, batch.generates = raw, generates
        self._put(batch.number, entries, b"".join(tokens))

    def write_following(self, number: int, steps: list[Any], places: list[int]) -> None:
        """Describe the decodes that come after ``steps`` as batch ``number``. ``places``: of their tokens, which are to come, among
        those of the batch that runs."""
        pack, entries = _ENTRY.pack, []
        for at in range(len(steps)):
            step: Step = steps[at]
            session = step.session
            entries.append(pack(session.slot, at, 1, step.position + step.n_tokens, step.spec.entry))
        self._put(number, entries, struct.pack(f"<{len(places)}I", *places))

    def _put(self, number: int, entries: list[bytes], tokens: bytes) -> None:
        buffer, table, n = self.buffer, b"".join(entries), len(entries)
        HEADER.pack_into(buffer, 0, number, n, len(tokens) // 4)
        buffer[self.steps_at : self.steps_at + len(table)] = table
        buffer[self.tokens_at : self.tokens_at + len(tokens)] = tokens
        # No status of the batch before may pass for an answer to this one.
        buffer[self.statuses_at : self.statuses_at + n] = bytes(n)

    def read(self, batch: Batch, messages: Sequence[str]) -> bool:
        """What the engine's host wrote, and said of the steps that failed. Whether all that the engine was given was done.

        Validated: every status is one, every token is in the vocabulary, and each failed step has its message. Raises ValueError.
        """
        at, n_steps, n = self.statuses_at, batch.size, batch.n_results
        statuses = bytes(self.buffer[at : at + n_steps])
        ids = self.ids[:n].tolist()
        n_done = statuses.count(DONE)
        if n_done < n_steps:
            wrong = set(statuses) - _STATUSES
            if wrong:
                raise ValueError(f"a step of the batch has status {min(wrong)}, which is none")
        # Only what fails this may be wrong: the places of steps without an answer hold anything.
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            self._check_answers(batch, statuses, ids)
        n_failed = sum(map(statuses.count, FAILURES))
        if len(messages) != n_failed:
            raise ValueError(f"{len(messages)} messages came for {n_failed} failed steps")
        logprobs: Any = self.logprobs[:n].tolist()
        batch.take_answers(statuses, ids, logprobs, messages)
        return n_done == n_steps

    def _check_answers(self, batch: Batch, statuses: bytes, ids: list[int]) -> None:
        at = 0
        for place, status in enumerate(statuses):
            n = batch.n_results_of(place)
            if status == DONE:
                for token in ids[at : at + n]:
                    if not 0 <= token < self.vocab_size:
                        raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
            at += n


class BatchesInFlight:
    """The batches of one incarnation of an engine, numbered from 1 on."""

    __slots__ = ("following", "given", "given_ahead", "max_decodes", "running", "slots")
    __reduce__ = not_copied

    def __init__(self, buffer: memoryview, max_decodes: int, max_tokens: int, vocab_size: int) -> None:
        """``buffer``: the engine's segment."""
        size = BatchSlotLayout(max_tokens).size
        self.slots = [BatchSlot(buffer[i * size : (i + 1) * size], max_tokens, vocab_size) for i in range(BATCH_SLOTS)]
        self.max_decodes = max_decodes
        self.running: Batch | None = None
        self.following: Batch | None = None
        """Only while one runs."""
        self.given = 0
        """How many batches so far,"""
        self.given_ahead = 0
        """and how many of these while another one ran."""

    def give(self, now: float, steps: list[Any]) -> Batch | None:
        """The steps, if there are any, are the engine's batch from here on; it has none. If this raises, they are not."""
        if not steps:
            return None
        batch = Batch(self.given + 1, steps, now)
        slot: BatchSlot = self.slots[batch.number % BATCH_SLOTS]
        slot.write(batch)
        failpoints.hit("daemon.batch.written")
        self.given, self.running = batch.number, batch
        return batch

    def give_ahead(self, batch: Batch) -> int | None:
        """What comes after the batch that runs, of generations alone, is the engine's from here on. Returns its number; None if
        something follows already, or all end with this batch, or a client does not keep up."""
        if self.following is not None:
            return None
        following = Batch(self.given + 1, [], 0.0)
        after, steps = following.after, []
        rooms: dict[Any, int] = {}
        for k, step in enumerate(batch.steps):
            generation = step.spec.generation
            # A step that has been settled meanwhile may be of a client that is gone.
            if generation.further and step.state is IN_FLIGHT:
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
                if step.spec.deadline:
                    following.deadline = min(following.deadline, step.spec.deadline)
        # Chunks of prompts are followed by decodes, of which a batch may hold fewer.
        if not 0 < len(steps) <= self.max_decodes:
            return None
        following.size = following.n_results = len(after)
        following.given = [step.session for step in steps]
        self.given = following.number
        self.given_ahead += 1
        self.following = following
        places = after if batch.places is None else [batch.places[k] for k in after]
        slot: BatchSlot = self.slots[following.number % BATCH_SLOTS]
        slot.write_following(following.number, steps, places)
        failpoints.hit("daemon.follow.written")
        return following.number

    def take_back(self, number: int) -> Batch | None:
        """The engine has answered batch ``number``. None if it does not run that one."""
        batch = self.running
        if batch is None or batch.number != number:
            return None
        self.running = None
        return batch

    def put_back(self, batch: Batch) -> None:
        """What the engine has answered could not be settled to the end."""
        if self.running is None:
            self.running = batch

    def read(self, batch: Batch, messages: Sequence[str]) -> bool:
        """Take the answers to the steps. Whether all that the engine was given was done. Raises ValueError if they do not fit."""
        return self.slots[batch.number % BATCH_SLOTS].read(batch, messages)

    def go_on(self, followers: dict[int, Step], now: float) -> list[Any]:
        """A batch has ended, and the engine has begun what follows it, with ``followers``: what comes after the steps of that one,
        or nothing where the engine skips it. Returns those that it runs."""
        batch, self.running, self.following = self.following, self.following, None
        assert batch is not None
        batch.begin(followers, now)
        return batch.steps

    def clear(self) -> Batch | None:
        """The engine is dead. Returns what it ran; its memory may go."""
        batch, self.running, self.following = self.running, None, None
        self.slots.clear()
        return batch

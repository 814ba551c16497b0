"""Writing a batch into the engine's segment, and reading the results back."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from shmsched.daemon.state import Step
from shmsched.dataplane.layouts import HEADER, SAMPLING, BatchSlotLayout, StepStatus
from shmsched.scheduling import SchedulerParams

_STATUSES = {int(status) for status in StepStatus}
DONE = int(StepStatus.DONE)
FAILURES = bytes([StepStatus.FAILED, StepStatus.NO_ARENA, StepStatus.SPOILT])
"""Each of these has a message."""
WANTED = struct.Struct(f"<HH{SAMPLING.size}sQQ")
"""What of a step's entry is the same for every step that wants the same: from ``output_rows`` on."""
_ENTRY = struct.Struct(f"<IIII{WANTED.size}s")


class Answers(NamedTuple):
    """What became of a batch: a status for each step, and the sampled tokens of all steps, in step order, with their
    log-probabilities; and what is said of each that failed."""

    statuses: bytes
    ids: list[int]
    logprobs: list[float]
    messages: Sequence[str]

    @property
    def all_done(self) -> bool:
        return self.statuses.count(DONE) == len(self.statuses)

    def of(self, places: list[int]) -> Answers:
        """Those of some of the steps, where one token answers each."""
        said = iter(self.messages)
        messages = {place: next(said) for place, status in enumerate(self.statuses) if status in FAILURES}
        return Answers(
            bytes([self.statuses[place] for place in places]),
            [self.ids[place] for place in places],
            [self.logprobs[place] for place in places],
            [messages[place] for place in places if place in messages],
        )


class BatchSlot:
    """The scheduler's side of one batch slot. It belongs to the engine from Work to Done."""

    def __init__(self, buffer: memoryview, limits: SchedulerParams, vocab_size: int) -> None:
        layout = BatchSlotLayout(limits.max_batch_size)
        n = layout.max_tokens
        self._vocab_size = vocab_size
        self._buffer = buffer
        self._steps_offset, self._tokens_offset = layout.steps_offset, layout.tokens_offset
        self._statuses_offset = layout.statuses_offset
        # As memoryviews, of which a few are read in half the time that it takes with numpy.
        self._ids = buffer[layout.ids_offset :][: 4 * n].cast("i")
        self._logprobs = buffer[layout.logprobs_offset :][: 4 * n].cast("f")

    def write(self, batch: int, steps: list[Step]) -> list[int]:
        """Describe ``steps`` as batch number ``batch``. Returns how many tokens each has."""
        pack, start = _ENTRY.pack, 0
        entries, tokens, lengths = [], [], []
        for step in steps:
            n = step.n_tokens
            entries.append(pack(step.session.slot, start, n, step.position, step.wanted.entry))
            tokens.append(step.tokens)
            lengths.append(n)
            start += n
        HEADER.pack_into(self._buffer, 0, batch, len(steps), start)
        self._put(self._steps_offset, b"".join(entries))
        self._put(self._tokens_offset, b"".join(tokens))
        # No status of the batch before may pass for an answer to this one.
        self._put(self._statuses_offset, bytes(len(steps)))
        return lengths

    def write_following(self, batch: int, steps: list[Step], places: list[int]) -> None:
        """Describe the decodes that come after ``steps`` as batch number ``batch``. ``places``: of their tokens, which are to come,
        among those of the batch that runs."""
        pack, n = _ENTRY.pack, len(steps)
        entries = [
            pack(step.session.slot, i, 1, step.position + step.n_tokens, step.wanted.entry)
            for i, step in enumerate(steps)
        ]
        HEADER.pack_into(self._buffer, 0, batch, n, n)
        self._put(self._steps_offset, b"".join(entries))
        self._put(self._tokens_offset, struct.pack(f"<{n}I", *places))
        self._put(self._statuses_offset, bytes(n))

    def _put(self, at: int, data: bytes) -> None:
        self._buffer[at : at + len(data)] = data

    def read(self, n_steps: int, answers: list[int] | None, messages: Sequence[str]) -> Answers:
        """What the engine's host wrote, and said of the steps that failed. Validated: every status is one, every token is in the
        vocabulary, and each failed step has its message. Raises ValueError.

        ``answers``: how many tokens answer each step; None for one each.
        """
        at = self._statuses_offset
        statuses = self._buffer[at : at + n_steps].tobytes()
        n = n_steps if answers is None else sum(answers)
        ids = self._ids[:n].tolist()
        if statuses.count(DONE) < n_steps:
            wrong = set(statuses) - _STATUSES
            if wrong:
                raise ValueError(f"a step of the batch has status {min(wrong)}, which is none")
        # Only what fails this may be wrong: the places of steps without an answer hold anything.
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
            self._check_answers(statuses, answers or [1] * n_steps, ids)
        logprobs: list[float] = self._logprobs[:n].tolist()  # type: ignore[assignment]
        n_failed = sum(map(statuses.count, FAILURES))
        if len(messages) != n_failed:
            raise ValueError(f"{len(messages)} messages came for {n_failed} failed steps")
        return Answers(statuses, ids, logprobs, messages)

    def _check_answers(self, statuses: bytes, answers: list[int], ids: list[int]) -> None:
        at = 0
        for n, status in zip(answers, statuses, strict=True):
            if status == StepStatus.DONE:
                for token in ids[at : at + n]:
                    if not 0 <= token < self._vocab_size:
                        raise ValueError(f"token {token} is outside the vocabulary of {self._vocab_size}")
            at += n

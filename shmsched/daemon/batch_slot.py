"""Writing a batch into the engine's segment, and reading the results back."""

from __future__ import annotations

import struct

from shmsched.daemon.state import Step
from shmsched.memory.layouts import HEADER, SAMPLING, BatchSlotLayout, StepStatus
from shmsched.scheduling import SchedulerParams

_STATUSES = {int(status) for status in StepStatus}
DONE = int(StepStatus.DONE)
WANTED = struct.Struct(f"<HH{SAMPLING.size}sQQ")
"""What of a step's entry is the same for every step that wants the same: from ``output_rows`` on."""
_ENTRY = struct.Struct(f"<IIII{WANTED.size}s")


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

    def _put(self, at: int, data: bytes) -> None:
        self._buffer[at : at + len(data)] = data

    def read(self, steps: list[Step], plain: bool) -> tuple[bytes, list[int], list[float]]:
        """What the engine's host wrote: a status for each step, and the sampled tokens of all steps, in step order, with
        their log-probabilities. Validated: every status is one, every token is in the vocabulary. Raises ValueError.

        ``plain``: every step is.
        """
        at, n_steps = self._statuses_offset, len(steps)
        statuses = self._buffer[at : at + n_steps].tobytes()
        n = n_steps if plain else sum([step.wanted.n_results for step in steps])
        ids = self._ids[:n].tolist()
        if statuses.count(DONE) < n_steps:
            wrong = set(statuses) - _STATUSES
            if wrong:
                raise ValueError(f"a step of the batch has status {min(wrong)}, which is none")
        # Only what fails this may be wrong: the places of steps without an answer hold anything.
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
            self._check_answers(steps, statuses, ids)
        logprobs: list[float] = self._logprobs[:n].tolist()  # type: ignore[assignment]
        return statuses, ids, logprobs

    def _check_answers(self, steps: list[Step], statuses: bytes, ids: list[int]) -> None:
        at = 0
        for step, status in zip(steps, statuses, strict=True):
            n = step.wanted.n_results
            if status == StepStatus.DONE:
                for token in ids[at : at + n]:
                    if not 0 <= token < self._vocab_size:
                        raise ValueError(f"token {token} is outside the vocabulary of {self._vocab_size}")
            at += n

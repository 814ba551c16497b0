"""Writing a batch into the engine's segment, and reading the results back."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shmsched.daemon.state import Step
from shmsched.memory.layouts import HEADER, STEP, BatchSlotLayout, StepStatus
from shmsched.scheduling import SchedulerParams

_STATUSES = {int(status) for status in StepStatus}


class Results(NamedTuple):
    """What the engine's host wrote: a status for each step, and the sampled tokens of all steps in step order."""

    statuses: list[int]
    ids: list[int]
    logprobs: list[float]


class BatchSlot:
    """The scheduler's side of one batch slot. It belongs to the engine from Work to Done."""

    def __init__(self, buffer: memoryview, limits: SchedulerParams, vocab_size: int) -> None:
        layout = BatchSlotLayout(limits.max_batch_size)
        n = layout.max_tokens
        self._vocab_size = vocab_size
        self._buffer = buffer
        self._steps_offset, self._tokens_offset = layout.steps_offset, layout.tokens_offset
        self._statuses_offset = layout.statuses_offset
        self._statuses: npt.NDArray[np.uint8] = np.frombuffer(buffer, np.uint8, n, layout.statuses_offset)
        self._ids: npt.NDArray[np.int32] = np.frombuffer(buffer, np.int32, n, layout.ids_offset)
        self._logprobs: npt.NDArray[np.float32] = np.frombuffer(buffer, np.float32, n, layout.logprobs_offset)

    def write(self, batch: int, steps: list[Step]) -> None:
        """Describe ``steps`` as batch number ``batch``."""
        start = 0
        rows = []
        for step in steps:
            session = step.session
            rows.append(
                STEP.pack(
                    session.slot,
                    start,
                    step.n_tokens,
                    step.position,
                    step.output_rows,
                    step.sampled,
                    step.sampling,
                    session.client.number,
                    step.rows_offset,
                )
            )
            start += step.n_tokens
        HEADER.pack_into(self._buffer, 0, batch, len(steps), start)
        self._put(self._steps_offset, b"".join(rows))
        self._put(self._tokens_offset, b"".join([step.tokens for step in steps]))
        # No status of the batch before may pass for an answer to this one.
        self._put(self._statuses_offset, bytes(len(steps)))

    def _put(self, at: int, data: bytes) -> None:
        self._buffer[at : at + len(data)] = data

    def read(self, steps: list[Step]) -> Results:
        """The results, validated: every status is one, every token is in the vocabulary. Raises ValueError."""
        statuses = self._statuses[: len(steps)].tolist()
        n = sum([step.n_rows for step in steps if step.sampled])
        ids = self._ids[:n].tolist()
        wrong = set(statuses) - _STATUSES
        if wrong:
            raise ValueError(f"a step of the batch has status {min(wrong)}, which is none")
        # Only what fails this may be wrong: the places of steps without an answer hold anything.
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
            self._check_answers(steps, statuses, ids)
        return Results(statuses, ids, self._logprobs[:n].tolist())

    def _check_answers(self, steps: list[Step], statuses: list[int], ids: list[int]) -> None:
        at = 0
        for step, status in zip(steps, statuses, strict=True):
            if not step.sampled:
                continue
            if status == StepStatus.DONE:
                for token in ids[at : at + step.n_rows]:
                    if not 0 <= token < self._vocab_size:
                        raise ValueError(f"token {token} is outside the vocabulary of {self._vocab_size}")
            at += step.n_rows

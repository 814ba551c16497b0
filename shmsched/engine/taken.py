"""For engines that cannot always run a whole batch: which steps can run, and the batch without the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shmsched.engine.batch_view import BatchView, StepRow
from shmsched.engine.contract import EngineInfo

Ints = npt.NDArray[np.integer]


def runnable(batch: BatchView, lengths: Mapping[int, int], info: EngineInfo, limit: str = "") -> list[int]:
    """The steps that can be done; the others are failed. ``lengths`` has the tokens of each slot's session.

    ``limit`` says in the engine's words what bounds a session, in place of ``max_session_tokens``.
    """
    possible = []
    for i, (slot, start, length) in enumerate(batch.steps):
        held, position = lengths[slot], int(batch.positions[start])
        tokens = batch.tokens[start : start + length]
        if position != held:
            batch.fail(i, f"its first token is at position {position}; the session has {held} tokens")
        elif held + length > info.max_session_tokens:
            most = limit or f"max_session_tokens is {info.max_session_tokens}"
            batch.fail(i, f"the session would have {held + length} tokens; {most}")
        elif tokens.min() < 0 or tokens.max() >= info.vocab_size:
            batch.fail(i, f"it has a token outside the vocabulary of {info.vocab_size}")
        else:
            possible.append(i)
    return possible


@dataclass(frozen=True, slots=True)
class TakenSteps:
    """The steps of a batch that run now, as if they were the whole of it.

    ``tokens``, ``positions``, ``steps`` and ``outputs`` are as in :class:`BatchView`; ``wanted[k]`` is the batch's number
    of output k here.
    """

    tokens: Ints
    positions: Ints
    steps: list[StepRow]
    outputs: Ints
    wanted: Ints

    @classmethod
    def of(cls, batch: BatchView, taken: Sequence[int]) -> TakenSteps:
        if len(taken) == len(batch.steps):
            return cls(batch.tokens, batch.positions, list(batch.steps), batch.outputs, np.arange(len(batch.outputs)))
        steps, row = [], 0
        row_of = np.full(len(batch.tokens), -1)
        for slot, start, length in (batch.steps[i] for i in taken):
            steps.append(StepRow(slot, row, length))
            row_of[start : start + length] = np.arange(row, row + length)
            row += length
        kept = np.flatnonzero(row_of >= 0)
        wanted = np.flatnonzero(row_of[batch.outputs] >= 0)
        return cls(batch.tokens[kept], batch.positions[kept], steps, row_of[batch.outputs[wanted]], wanted)

    def runs(self) -> Iterator[tuple[int, slice]]:
        """For ``put_logits``: the outputs here in slices that are consecutive in the batch, each with its first number there."""
        ends = np.flatnonzero(np.diff(self.wanted) > 1) + 1
        for start, stop in zip([0, *ends.tolist()], [*ends.tolist(), len(self.wanted)], strict=True):
            if start < stop:
                yield int(self.wanted[start]), slice(start, stop)

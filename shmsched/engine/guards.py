"""Finding out an engine that writes beyond the rows it was given.

Around the rows of each raw step lie ``GUARD`` bytes that belong to the step too. The host fills them before a batch and looks at
them after it. A ``BatchView`` gives no array that reaches them, but a kernel that gets a pointer and a wrong size does.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping

from shmsched.dataplane.layouts import ALL_ROWS, GUARD, LOGIT_SIZE, STEP
from shmsched.engine.batch_slot import Pulled

WORDS = os.urandom(GUARD)


class WroteBeyondRows(Exception):
    """The engine has written where another step's logits may lie: nothing in its clients' arenas can be trusted to it."""


class Guards:
    """The guard words of one batch. ``arenas``: the memory of each client's arena, by client."""

    def __init__(self, batch: Pulled, arenas: Mapping[int, mmap.mmap], vocab_size: int) -> None:
        self._batch = batch
        self._places: list[tuple[int, mmap.mmap, int, int]] = []
        row_size = vocab_size * LOGIT_SIZE
        steps = STEP.iter_unpack(batch.packed)
        for i, (_, _, length, _, output_rows, sampled, _, client, offset) in enumerate(steps):
            arena = arenas.get(client)
            if sampled or not output_rows or arena is None:
                continue
            before = offset - GUARD
            behind = offset + row_size * (length if output_rows == ALL_ROWS else output_rows)
            arena[before:offset] = arena[behind : behind + GUARD] = WORDS
            self._places.append((i, arena, before, behind))

    def check(self) -> None:
        """Raises WroteBeyondRows if any of them has changed."""
        for i, arena, before, behind in self._places:
            if arena[before : before + GUARD] != WORDS or arena[behind : behind + GUARD] != WORDS:
                step = self._batch.entries()[i]
                raise WroteBeyondRows(
                    f"it wrote beyond the rows of the step at position {step.position} in slot {step.slot}"
                    f" ({step.length} tokens, rows at byte {step.rows_offset} of the arena of client {step.client})"
                )

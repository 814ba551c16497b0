"""Finding out an engine that writes beyond the rows it was given.

Around the rows of each raw step lie ``GUARD`` bytes that belong to the step too. The host fills them before a batch and looks at
them after it. A ``BatchView`` gives no array that reaches them, but a kernel that gets a pointer and a wrong size does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from shmsched.memory.layouts import GUARD, LOGIT, StepEntry

WORDS = os.urandom(GUARD)


class WroteBeyondRows(Exception):
    """The engine has written where another step's logits may lie: nothing in its clients' arenas can be trusted to it."""


class Guards:
    """The guard words of one batch. ``arenas``: the bytes of each client's arena, by client."""

    def __init__(self, entries: Sequence[StepEntry], arenas: Mapping[int, memoryview], vocab_size: int) -> None:
        self._places: list[tuple[memoryview, StepEntry]] = []
        for entry in entries:
            if entry.sampled or not entry.output_rows:
                continue
            size = entry.n_rows * vocab_size * LOGIT.itemsize
            arena, at = arenas[entry.client], entry.rows_offset
            for guard in (arena[at - GUARD : at], arena[at + size : at + size + GUARD]):
                guard[:] = WORDS
                self._places.append((guard, entry))

    def check(self) -> None:
        """Raises WroteBeyondRows if any of them has changed."""
        for guard, entry in self._places:
            if guard != WORDS:
                raise WroteBeyondRows(
                    f"it wrote beyond the rows of the step at position {entry.position} in slot {entry.slot}"
                    f" ({entry.length} tokens, rows at byte {entry.rows_offset} of the arena of client {entry.client})"
                )

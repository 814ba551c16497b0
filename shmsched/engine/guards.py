"""Finding out an engine that writes beyond the rows it was given.

Around the rows of each raw step lie ``GUARD`` bytes that belong to the step too. The host fills them before a batch and looks at
them after it. A ``BatchView`` gives no array that reaches them, but a kernel that gets a pointer and a wrong size does.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping

from shmsched.dataplane.forward import Batch
from shmsched.dataplane.layouts import GUARD, LOGIT_SIZE

WORDS = os.urandom(GUARD)


class WroteBeyondRows(Exception):
    """The engine has written where another step's logits may lie: nothing in its clients' arenas can be trusted to it."""


class Guards:
    """The guard words of one batch. ``arenas``: the memory of each client's arena, by client."""

    def __init__(self, batch: Batch, arenas: Mapping[int, mmap.mmap], vocab_size: int) -> None:
        self._batch = batch
        self._places: list[tuple[int, mmap.mmap, int, int]] = []
        for i in sorted(batch.raw):
            client, offset = batch.places[i]
            if (arena := arenas.get(client)) is None:
                continue
            before, behind = offset - GUARD, offset + batch.n_rows[i] * vocab_size * LOGIT_SIZE
            arena[before:offset] = arena[behind : behind + GUARD] = WORDS
            self._places.append((i, arena, before, behind))

    def check(self) -> None:
        """Raises WroteBeyondRows if any of them has changed."""
        batch = self._batch
        for i, arena, before, behind in self._places:
            if arena[before : before + GUARD] != WORDS or arena[behind : behind + GUARD] != WORDS:
                client, offset = batch.places[i]
                raise WroteBeyondRows(
                    f"it wrote beyond the rows of the step at position {batch.positions[i]} in slot {batch.slots[i]}"
                    f" ({batch.lengths[i]} tokens, rows at byte {offset} of the arena of client {client})"
                )

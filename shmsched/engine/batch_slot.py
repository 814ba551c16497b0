"""Reading a batch from the engine's segment; the results go back there.

There is no numpy here beside the tokens' array. Between batches the other processes have the caches, and then a call into
numpy costs 3 to 10 us, whatever it does.
"""

from __future__ import annotations

from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shmsched import failpoints
from shmsched.dataplane.layouts import HEADER, SAMPLING, STEP, BatchSlotLayout, StepEntry, StepStatus
from shmsched.errors import ProtocolError

_U32S, _U64S = STEP.size // 4, STEP.size // 8
"""A step in words of either size: every ``_U32S``-th word from the 4th on is the position of a step."""
_SAMPLING_AT = 20
_DONE = int(StepStatus.DONE)


class Pulled:
    """A batch out of its slot: its steps, copied, by column; its tokens lie where they lay."""

    __slots__ = ("kinds", "lengths", "packed", "positions", "slots", "tokens")

    def __init__(self, packed: bytes, tokens: npt.NDArray[np.int32]) -> None:
        """``packed``: the steps as STEP packs them, one after the other."""
        words = memoryview(packed).cast("I")
        self.packed = packed
        self.tokens = tokens
        self.slots: list[int] = words[0::_U32S].tolist()
        self.lengths: list[int] = words[2::_U32S].tolist()
        self.positions: list[int] = words[3::_U32S].tolist()
        self.kinds: list[int] = words[4::_U32S].tolist()
        """``output_rows`` in the lower 16 bits, ``sampled`` in the upper ones."""

    def follow(self, answers: bytes) -> None:
        """Take the batch's tokens from ``answers``, int32, those sampled in the batch that it follows: so far they name places there.
        Raises ProtocolError for a place that is none."""
        sampled = memoryview(answers).cast("i").tolist()
        places = self.tokens.tolist()
        if not (min(places) >= 0 and max(places) < len(sampled)):
            raise ProtocolError(f"a batch follows one of {len(sampled)} sampled tokens, and asks for numbers {places}")
        self.tokens = np.array(list(map(sampled.__getitem__, places)), np.int32)

    def sampling(self) -> list[bytes]:
        """As SAMPLING packs it."""
        packed, size = self.packed, SAMPLING.size
        return [packed[at : at + size] for at in range(_SAMPLING_AT, len(packed), STEP.size)]

    def places(self) -> list[tuple[int, int]]:
        """The client and the ``rows_offset`` of each."""
        words = memoryview(self.packed).cast("Q")
        return list(zip(words[5::_U64S].tolist(), words[6::_U64S].tolist(), strict=True))

    def entries(self) -> list[StepEntry]:
        # Past the named tuple's own constructor, which is Python: two thirds of the time.
        return list(map(tuple.__new__, repeat(StepEntry), STEP.iter_unpack(self.packed)))


class Results(NamedTuple):
    """What became of a batch, as it goes into the slot: statuses of its steps, the tokens of the sampled rows in step order with
    their log-probabilities; and the messages of the steps that failed."""

    statuses: bytes
    ids: bytes
    logprobs: bytes
    messages: tuple[str, ...] = ()

    @property
    def all_done(self) -> bool:
        return self.statuses.count(_DONE) == len(self.statuses)


class BatchSlot:
    """One batch slot of the engine's segment, as the host reads and writes it."""

    def __init__(self, buffer: memoryview, layout: BatchSlotLayout) -> None:
        self._buffer = buffer
        self._steps_offset = layout.steps_offset
        self._statuses_offset, self._ids_offset = layout.statuses_offset, layout.ids_offset
        self._logprobs_offset = layout.logprobs_offset
        self._tokens: npt.NDArray[np.int32] = np.frombuffer(buffer, np.int32, layout.max_tokens, layout.tokens_offset)

    def pull(self, batch: int) -> Pulled:
        number, n_steps, n_tokens = HEADER.unpack_from(self._buffer)
        if number != batch or not 0 < n_steps <= n_tokens <= len(self._tokens):
            raise ProtocolError(
                f"told to run batch {batch}, but the slot holds batch {number}: {n_steps} steps, {n_tokens} tokens"
            )
        at = self._steps_offset
        pulled = Pulled(bytes(self._buffer[at : at + STEP.size * n_steps]), self._tokens[:n_tokens])
        failpoints.hit("engine.batch.pulled")
        return pulled

    def write(self, results: Results) -> None:
        failpoints.hit("engine.logits.written")
        buffer, (statuses, ids, logprobs, _) = self._buffer, results
        buffer[self._statuses_offset : self._statuses_offset + len(statuses)] = statuses
        buffer[self._ids_offset : self._ids_offset + len(ids)] = ids
        buffer[self._logprobs_offset : self._logprobs_offset + len(logprobs)] = logprobs

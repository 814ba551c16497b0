"""Reading a batch from the engine's segment; the results go back there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shmsched.errors import ProtocolError
from shmsched.memory.layouts import HEADER, STEP, BatchSlotLayout, StepEntry


class BatchSlot:
    """One batch slot of the engine's segment, as the host reads and writes it."""

    def __init__(self, buffer: memoryview, layout: BatchSlotLayout) -> None:
        n = layout.max_tokens
        self._header = buffer
        self._steps = buffer[layout.steps_offset :]
        self._tokens: npt.NDArray[np.int32] = np.frombuffer(buffer, np.int32, n, layout.tokens_offset)
        self.statuses: npt.NDArray[np.uint8] = np.frombuffer(buffer, np.uint8, n, layout.statuses_offset)
        self.ids: npt.NDArray[np.int32] = np.frombuffer(buffer, np.int32, n, layout.ids_offset)
        self.logprobs: npt.NDArray[np.float32] = np.frombuffer(buffer, np.float32, n, layout.logprobs_offset)

    def pull(self, batch: int) -> tuple[list[StepEntry], npt.NDArray[np.int32]]:
        number, n_steps, n_tokens = HEADER.unpack_from(self._header)
        if number != batch or not 0 < n_steps <= n_tokens <= len(self._tokens):
            raise ProtocolError(
                f"told to run batch {batch}, but the slot holds batch {number}: {n_steps} steps, {n_tokens} tokens"
            )
        rows = STEP.iter_unpack(self._steps[: STEP.size * n_steps])
        return [StepEntry._make(row) for row in rows], self._tokens[:n_tokens]

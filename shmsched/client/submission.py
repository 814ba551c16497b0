"""What one call submits, and how it travels."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shmsched.steps import OutputRows, RequestParams
from shmsched.wire.frames import StepDescriptor, StepFlags

if TYPE_CHECKING:
    from shmsched.client.session_core import SessionCore


class Submission(NamedTuple):
    """What one call submits: checked, and split into chunks that the engine takes."""

    session: SessionCore
    request_id: int
    chunks: list[npt.NDArray[np.int32]]
    position: int
    params: RequestParams
    deadline: float = 0.0
    """In seconds of ``time.monotonic()``; 0 for none."""
    further: int = 0
    """How many decodes the scheduler may queue after it, and what ends them."""
    stop_tokens: tuple[int, ...] = ()

    @property
    def n_tokens(self) -> int:
        chunks = self.chunks
        return len(chunks[0]) if len(chunks) == 1 else sum(len(chunk) for chunk in chunks)

    @property
    def n_rows(self) -> int:
        return self.params.output_rows.count(len(self.chunks[-1]))

    @property
    def raw_rows(self) -> int:
        """How many rows of the arena its answer takes."""
        return self.n_rows if self.params.sampling is None else 0

    def describe(self, first_request: int, rows_offset: int) -> list[StepDescriptor]:
        """A descriptor for each chunk, numbered from ``first_request`` on; only the last asks for output."""
        params, session = self.params, self.session
        sampling = params.sampling
        how = (0, 0.0, 1.0, 0)
        flags = 0
        if sampling is not None:
            seed = session.seed if sampling.seed is None else sampling.seed
            how = (sampling.top_k, sampling.temperature, sampling.top_p, seed)
            flags = StepFlags.SAMPLED
        descriptors = []
        position = self.position
        last = len(self.chunks) - 1
        for i, chunk in enumerate(self.chunks):
            n = len(chunk)
            if i < last:
                descriptor = StepDescriptor(
                    first_request + i, session.session_id, n, position, OutputRows.NONE, flags | StepFlags.MORE, *how,
                    rows_offset, 0, 0, self.deadline,
                )  # fmt: skip
            else:
                descriptor = StepDescriptor(
                    first_request + i, session.session_id, n, position, params.output_rows, flags, *how,
                    rows_offset, self.further, len(self.stop_tokens), self.deadline,
                )  # fmt: skip
            descriptors.append(descriptor)
            position += n
        return descriptors

"""What one call submits, and how it travels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shmsched.errors import InvalidRequest
from shmsched.memory.layouts import SAMPLING
from shmsched.steps import OutputRows, SamplingParams
from shmsched.wire.frames import StepDescriptor, StepFlags

if TYPE_CHECKING:
    from shmsched.client.generation.course import Course
    from shmsched.client.session_core import SessionCore

SAMPLED, MORE = int(StepFlags.SAMPLED), int(StepFlags.MORE)
UNSAMPLED = bytes(SAMPLING.size)


class Submission:
    """What one call submits: checked, and split into chunks that the engine takes.

    ``position`` and ``request_id`` may be left open (None): they are filled in when it is sent, by where the session stands then.
    """

    __slots__ = (
        "chunks", "course", "deadline", "further", "n_rows", "n_tokens", "output_rows", "position", "raw_rows", "request_id",
        "sampling", "session", "start", "stop_tokens",
    )  # fmt: skip

    def __init__(
        self,
        session: SessionCore,
        tokens: npt.NDArray[np.int32],
        position: int | None,
        sampling: SamplingParams | None,
        output_rows: OutputRows,
        deadline: float = 0.0,
        further: int = 0,
        stop_tokens: tuple[int, ...] = (),
        request_id: int | None = None,
        course: Course | None = None,
    ) -> None:
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise InvalidRequest(f"sampling is {sampling!r}; a SamplingParams, or None for raw logits, is wanted")
        n = len(tokens)
        size = session.model.max_prefill_chunk_size
        if n <= size:
            self.chunks = [tokens]
        elif output_rows is OutputRows.ALL:
            raise InvalidRequest(f"output_rows=ALL with {n} tokens; they must fit one chunk of {size}")
        elif request_id is not None:
            raise InvalidRequest(f"request {request_id} has {n} tokens; a step has at most {size}")
        else:
            self.chunks = [tokens[i : i + size] for i in range(0, n, size)]
        self.session = session
        self.position = position
        self.start = 0
        """Where it starts; known once it is placed."""
        self.sampling = sampling
        self.output_rows = output_rows
        self.deadline = deadline
        """In seconds of ``time.monotonic()``; 0 for none."""
        self.further = further
        """How many decodes the scheduler may queue after it, and what ends them."""
        self.stop_tokens = stop_tokens
        self.request_id = request_id
        self.course = course
        """The generation that it belongs to."""
        self.n_tokens = n
        self.n_rows = output_rows.count(len(self.chunks[-1]))
        self.raw_rows = self.n_rows if sampling is None else 0
        """How many rows of the arena its answer takes."""

    def describe(self, first_request: int, rows_offset: int) -> list[StepDescriptor]:
        """A descriptor for each chunk, numbered from ``first_request`` on; only the last asks for output."""
        session, sampling = self.session, self.sampling
        packed, flags = UNSAMPLED, 0
        if sampling is not None:
            flags = SAMPLED
            seed = session.seed if sampling.seed is None else sampling.seed
            packed = SAMPLING.pack(sampling.top_k, sampling.temperature, sampling.top_p, seed)
        descriptors: list[StepDescriptor] = []
        position = self.start
        for chunk in self.chunks[:-1]:
            descriptor = StepDescriptor(
                first_request + len(descriptors), session.session_id, len(chunk), position, OutputRows.NONE, flags | MORE,
                packed, rows_offset, 0, 0, self.deadline,
            )  # fmt: skip
            descriptors.append(descriptor)
            position += len(chunk)
        last = StepDescriptor(
            first_request + len(descriptors), session.session_id, len(self.chunks[-1]), position, self.output_rows, flags,
            packed, rows_offset, self.further, len(self.stop_tokens), self.deadline,
        )  # fmt: skip
        descriptors.append(last)
        return descriptors

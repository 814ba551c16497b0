"""The scheduler's limits."""

from __future__ import annotations

from dataclasses import dataclass

from shmsched.arguments import whole
from shmsched.errors import InvalidRequest

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SchedulerParams:
    """How much one batch may hold.

    ``max_batch_size`` is derived and never stored, so that limits that contradict each other cannot be written down: a
    full chunk always fits beside a saturated decode batch, and a second one beside it.
    """

    max_decode_sequences: int = 32
    max_prefill_chunk_size: int = 256

    def __post_init__(self) -> None:
        for name in ("max_decode_sequences", "max_prefill_chunk_size"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1, INT32_MAX))
        if self.max_batch_size > INT32_MAX:
            raise InvalidRequest(
                f"2 * max_prefill_chunk_size + max_decode_sequences is {self.max_batch_size}; at most {INT32_MAX} fits"
            )

    @property
    def max_batch_size(self) -> int:
        """The most tokens in one batch: 2 * max_prefill_chunk_size + max_decode_sequences."""
        return 2 * self.max_prefill_chunk_size + self.max_decode_sequences

    def within(
        self, max_batch_size: int | None, max_decode_sequences: int | None, max_prefill_chunk_size: int | None
    ) -> SchedulerParams:
        """The largest limits that exceed neither these nor an engine's own (None: no limit of its own).

        A batch size smaller than the other two allow for shrinks the chunk first, then the decodes.
        """
        decodes = min(self.max_decode_sequences, max_decode_sequences or self.max_decode_sequences)
        chunk = min(self.max_prefill_chunk_size, max_prefill_chunk_size or self.max_prefill_chunk_size)
        if max_batch_size is not None and 2 * chunk + decodes > max_batch_size:
            decodes = min(decodes, max(1, max_batch_size // 3))
            chunk = min(chunk, (max_batch_size - decodes) // 2)
        return SchedulerParams(decodes, chunk)

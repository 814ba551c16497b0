"""What a client asks of a step, beside its tokens. Without numpy, which the scheduler's process has no use for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral, Real

from shmsched.arguments import shown
from shmsched.errors import InvalidRequest

MAX_SEED = 2**64 - 1
MAX_TEMPERATURE = 1e6
LEAST_TOP_P = 1e-30


class OutputRows(IntEnum):
    """Which of a step's tokens the engine answers for."""

    NONE = 0
    """No row: a chunk that only fills the cache."""
    LAST = 1
    """One row, for the step's last token."""
    ALL = 2
    """A row for each token, as verifying drafted tokens needs."""

    def count(self, n_tokens: int) -> int:
        """The number of output rows of a step of ``n_tokens`` tokens."""
        return (0, 1, n_tokens)[self]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn from one row of logits.

    ``temperature`` 0 is greedy (the lowest index wins a tie). ``top_k`` 0 and ``top_p`` 1 leave the distribution whole.
    ``seed`` None: one is drawn for each session. A token depends on the logits, these parameters, the seed and the
    position, and on nothing else.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        # A frame carries temperature and top_p as float32: what it cannot hold must not show only once a step is under way.
        if not _is_number(self.temperature) or not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise InvalidRequest(
                f"temperature is {shown(self.temperature)}; it must be a number from 0 to {MAX_TEMPERATURE:g}"
            )
        if not _is_number(self.top_p) or not LEAST_TOP_P <= self.top_p <= 1.0:
            raise InvalidRequest(
                f"top_p is {shown(self.top_p)}; it must be over 0 (at least {LEAST_TOP_P:g}) and at most 1"
            )
        if not _is_whole(self.top_k) or not 0 <= self.top_k < 2**31:
            raise InvalidRequest(f"top_k is {shown(self.top_k)}; it must be a whole number from 0 (off) to 2**31 - 1")
        if self.seed is not None and not (_is_whole(self.seed) and 0 <= self.seed <= MAX_SEED):
            raise InvalidRequest(f"seed is {shown(self.seed)}; it must be from 0 to 2**64 - 1, or None")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class RequestParams:
    """What a step asks for, beside its tokens.

    ``position`` is the place of the step's first token in its session. ``sampling`` None asks for the raw distribution.
    """

    position: int = 0
    sampling: SamplingParams | None = GREEDY
    output_rows: OutputRows = OutputRows.LAST

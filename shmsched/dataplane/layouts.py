"""Where every byte of a shared segment lies. Sizes come from the limits, so both sides compute the same offsets.

All integers are little-endian. ``dtypes`` has these layouts for numpy.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

CACHE_LINE = 64


def aligned(n: int) -> int:
    """``n`` rounded up to a cache line, so that no line has two writers."""
    return -(-n // CACHE_LINE) * CACHE_LINE


# --- the client segment: tokens in, completions out ---------------------------------------------------------------------


class RecordKind(IntEnum):
    """What a completion record says of its step."""

    TOKENS = 1
    """``n_rows`` results follow in the results ring."""
    LOGITS = 2
    """``n_rows`` rows of logits lie where the step asked for them."""
    TOKEN = 3
    """The one result is in the record itself: a decode's, and so nearly every one."""


class Record(NamedTuple):
    """A completed step."""

    request: int
    n_rows: int
    kind: int
    waited: float
    """For how many seconds it was queued."""
    token: int
    logprob: float


RECORD = struct.Struct("<QIIfif")


class Result(NamedTuple):
    """One sampled token of a completed step that has several."""

    token: int
    logprob: float


RESULT = struct.Struct("<if")


class Streamed(NamedTuple):
    """A token of a generation that goes on."""

    request: int
    token: int
    logprob: float
    waited: float
    """For how many seconds the step that gave it was queued."""


STREAMED = struct.Struct("<Qiff")


@dataclass(frozen=True, slots=True)
class ClientLayout:
    """The client segment: a token ring that the client writes, and three rings that the scheduler writes."""

    ring_tokens: int
    records: int
    results: int
    stream: int

    @property
    def records_offset(self) -> int:
        return aligned(4 * self.ring_tokens)

    @property
    def results_offset(self) -> int:
        return self.records_offset + aligned(RECORD.size * self.records)

    @property
    def stream_offset(self) -> int:
        return self.results_offset + aligned(RESULT.size * self.results)

    @property
    def size(self) -> int:
        return self.stream_offset + aligned(STREAMED.size * self.stream)


# --- the engine segment: batches out, results back ----------------------------------------------------------------------


SAMPLING = struct.Struct("<IffQ")
"""top_k, temperature, top_p and seed of a step, in one piece: the scheduler passes them on from client to engine and has no
use for them itself."""


class StepEntry(NamedTuple):
    """One step of a batch, as the scheduler describes it to the engine's host."""

    slot: int
    start: int
    length: int
    position: int
    output_rows: int
    sampled: int
    sampling: bytes
    """As SAMPLING packs it."""
    client: int
    rows_offset: int


STEP = struct.Struct(f"<IIIIHH{SAMPLING.size}sQQ")
HEADER = struct.Struct("<QII")  # batch number, steps, tokens


class StepStatus(IntEnum):
    """What became of one step of a batch; the engine's host writes it, and 0 is no answer at all."""

    DONE = 1
    DEFERRED = 2
    FAILED = 3
    NO_ARENA = 5
    """It wants raw logits, and the host could not map the arena of its client."""
    SPOILT = 6
    """It failed, and the engine has taken its tokens and cannot give them back: the session is over."""


@dataclass(frozen=True, slots=True)
class BatchSlotLayout:
    """One batch slot. The scheduler writes header, steps and tokens; the host writes statuses, ids and logprobs."""

    max_tokens: int

    @property
    def steps_offset(self) -> int:
        return aligned(HEADER.size)

    @property
    def tokens_offset(self) -> int:
        # A step has at least one token, so there are never more steps than tokens.
        return self.steps_offset + aligned(STEP.size * self.max_tokens)

    @property
    def statuses_offset(self) -> int:
        return self.tokens_offset + aligned(4 * self.max_tokens)

    @property
    def ids_offset(self) -> int:
        return self.statuses_offset + aligned(self.max_tokens)

    @property
    def logprobs_offset(self) -> int:
        return self.ids_offset + aligned(4 * self.max_tokens)

    @property
    def size(self) -> int:
        return self.logprobs_offset + aligned(4 * self.max_tokens)


LOGIT_SIZE = 4
"""Of a float32."""
GUARD = CACHE_LINE
"""Bytes in front of a raw step's rows in the arena, and behind them, in which nobody may write but the engine's host."""

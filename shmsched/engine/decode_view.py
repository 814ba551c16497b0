"""The batch that most batches are: decodes and nothing else. Of its view only what the engine asks for is made."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import overload

import numpy as np

from shmsched.engine.batch_slot import Pulled, Results
from shmsched.engine.batch_view import BatchView, Floats, Int32s, StepRow
from shmsched.engine.lazily import lazily
from shmsched.memory.layouts import LOGIT, SAMPLING, StepStatus
from shmsched.steps import OutputRows, SamplingParams

_RAW = int(OutputRows.LAST)
_KINDS = frozenset((_RAW, _RAW | 1 << 16))
_DONE = bytes([StepStatus.DONE])


@lru_cache(4096)
def sampling_params(packed: bytes) -> SamplingParams:
    """They are checked when made, and a session has the same ones at each step."""
    top_k, temperature, top_p, seed = SAMPLING.unpack(packed)
    return SamplingParams(temperature, top_p, top_k, seed)


class DecodeSteps(Sequence[StepRow]):
    """The rows of a batch of decodes, in these slots. They are made as they are read, and so mostly in the same place."""

    def __init__(self, slots: list[int]) -> None:
        self._slots = slots

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[StepRow]:
        # Past the named tuple's own constructor, which is Python: 0.15 us each instead of 0.35.
        rows = zip(self._slots, range(len(self._slots)), repeat(1), strict=False)
        return map(tuple.__new__, repeat(StepRow), rows)

    @overload
    def __getitem__(self, i: int) -> StepRow: ...
    @overload
    def __getitem__(self, i: slice) -> list[StepRow]: ...
    def __getitem__(self, i: int | slice) -> StepRow | list[StepRow]:
        if isinstance(i, slice):
            return list(self)[i]
        start = range(len(self._slots))[i]
        return StepRow(self._slots[start], start, 1)


class DecodeSampling(Sequence[SamplingParams | None]):
    """How each of them is sampled, unpacked once it is read: whether a step is sampled at all costs nothing to ask (``None in
    sampling``), and an engine that does not sample asks for no more."""

    def __init__(self, batch: Pulled, raw: Sequence[int]) -> None:
        self._batch = batch
        self._raw = raw

    @lazily
    def _params(self) -> list[SamplingParams | None]:
        packed = self._batch.sampling()
        if not self._raw:
            return list(map(sampling_params, packed))
        # A raw step's place for them holds anything.
        return [None if kind == _RAW else sampling_params(p) for kind, p in zip(self._batch.kinds, packed, strict=True)]

    def __len__(self) -> int:
        return len(self._batch.slots)

    def __contains__(self, params: object) -> bool:
        return len(self._raw) > 0 if params is None else params in self._params

    def __iter__(self) -> Iterator[SamplingParams | None]:
        return iter(self._params)

    @overload
    def __getitem__(self, k: int) -> SamplingParams | None: ...
    @overload
    def __getitem__(self, k: slice) -> list[SamplingParams | None]: ...
    def __getitem__(self, k: int | slice) -> SamplingParams | list[SamplingParams | None] | None:
        return self._params[k]


class DecodeView(BatchView):
    """A batch in which each step is one token of a session of its own, which goes on where that session ends, and has one
    output row. It is one pass as it stands, and output k is that of step k."""

    def __init__(self, batch: Pulled, raw: Sequence[int], arenas: Mapping[int, mmap.mmap], vocab_size: int) -> None:
        """``raw``: the steps that want raw logits. ``arenas``: the memory of each client's arena, by client."""
        n = len(batch.slots)
        self._batch = batch
        self._arenas = arenas
        self.steps = DecodeSteps(batch.slots)
        self.sampling = DecodeSampling(batch, raw)
        self._begin(batch.tokens, n, n, raw, vocab_size)

    @classmethod
    def of(
        cls, batch: Pulled, lengths: Mapping[int, int], arenas: Mapping[int, mmap.mmap], vocab_size: int
    ) -> DecodeView | None:
        """The view of this batch, if it is one of decodes. ``lengths``: of the session in each slot."""
        slots, kinds = batch.slots, batch.kinds
        n = len(slots)
        if (
            len(batch.tokens) != n
            or len(set(slots)) != n
            or list(map(lengths.get, slots)) != batch.positions
            or not _KINDS.issuperset(kinds)
        ):
            return None
        raw = [i for i, kind in enumerate(kinds) if kind == _RAW] if _RAW in kinds else ()
        return cls(batch, raw, arenas, vocab_size)

    @property
    def wants_raw(self) -> bool:
        return len(self._raw_outputs) > 0

    @lazily
    def positions(self) -> Int32s:
        return np.array(self._batch.positions, np.int32)

    @lazily
    def outputs(self) -> Int32s:
        return np.arange(self._n_outputs, dtype=np.int32)

    @lazily
    def _raw_rows(self) -> Sequence[Floats | None]:
        rows: list[Floats | None] = [None] * self._n_outputs
        if self._raw_outputs:
            places, arenas, vocab_size = self._batch.places(), self._arenas, self.vocab_size
            for k in self._raw_outputs:
                client, offset = places[k]
                rows[k] = np.frombuffer(arenas[client], LOGIT, vocab_size, offset)
        return rows

    def results(self) -> Results | None:
        """What the engine gave, if it gave something for each step, and no token that is none."""
        if self.finish() or self.failed or self.deferred:
            return None
        statuses = _DONE * self._n_steps
        if self._whole is not None:
            ids, logprobs, is_valid = self._whole
            return Results(statuses, ids, logprobs) if is_valid else None
        n_raw = len(self._raw_outputs)
        if n_raw == self._n_outputs:
            return Results(statuses, b"", b"")
        sampled = np.delete(self.token_ids, self._raw_outputs)
        if sampled.min() < 0 or sampled.max() >= self.vocab_size:
            return None
        return Results(
            statuses, sampled.astype(np.int32).tobytes(), np.delete(self.logprobs, self._raw_outputs).tobytes()
        )

"""The batch that most batches are: one pass as it stands. Of its view only what the engine asks for is made."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from typing import overload

import numpy as np

from shmsched.dataplane.dtypes import LOGIT
from shmsched.dataplane.layouts import SAMPLING, StepStatus
from shmsched.engine.batch_slot import Pulled, Results
from shmsched.engine.batch_view import BatchView, Floats, Int32s, StepRow
from shmsched.engine.lazily import lazily
from shmsched.params import OutputRows, SamplingParams

_RAW = int(OutputRows.LAST)
_SILENT = frozenset((int(OutputRows.NONE), OutputRows.NONE | 1 << 16))
_KINDS = _SILENT | {_RAW, _RAW | 1 << 16}
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


class OutputSampling(Sequence[SamplingParams | None]):
    """How each output is sampled, unpacked once it is read: whether one is sampled at all costs nothing to ask (``None in
    sampling``), and an engine that does not sample asks for no more."""

    def __init__(self, batch: Pulled, owners: Sequence[int], raw: Sequence[int]) -> None:
        self._batch = batch
        self._owners = owners
        self._raw = raw

    @lazily
    def _params(self) -> list[SamplingParams | None]:
        if len(self._raw) == len(self._owners):
            return [None] * len(self._owners)
        packed = self._batch.sampling()
        if not self._raw and len(packed) == len(self._owners):
            return list(map(sampling_params, packed))
        kinds = self._batch.kinds
        # A raw step's place for them holds anything.
        return [None if kinds[i] == _RAW else sampling_params(packed[i]) for i in self._owners]

    def __len__(self) -> int:
        return len(self._owners)

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


class StraightView(BatchView):
    """A batch in which each step is of a session of its own and goes on where that session ends, with one output row for its last
    token or none. It is one pass as it stands."""

    def __init__(
        self,
        batch: Pulled,
        owners: Sequence[int],
        raw: Sequence[int],
        arenas: Mapping[int, mmap.mmap],
        vocab_size: int,
    ) -> None:
        """``owners``: the step of each output. ``raw``: the outputs that are not sampled. ``arenas``: the memory of each client's
        arena, by client."""
        n = len(batch.slots)
        self._batch = batch
        self._arenas = arenas
        self.owners = owners
        # Where each step has one token, which is nearly always, nothing has to be added up.
        self._are_decodes = len(batch.tokens) == n
        if self._are_decodes:
            self.steps = DecodeSteps(batch.slots)
        else:
            starts = accumulate(batch.lengths, initial=0)
            rows = zip(batch.slots, starts, batch.lengths, strict=False)
            self.steps = list(map(tuple.__new__, repeat(StepRow), rows))
        self.sampling = OutputSampling(batch, owners, raw)
        self._begin(batch.tokens, n, len(owners), raw, vocab_size)

    @classmethod
    def of(
        cls, batch: Pulled, lengths: Mapping[int, int], arenas: Mapping[int, mmap.mmap], vocab_size: int
    ) -> StraightView | None:
        """The view of this batch, if it is such a one. ``lengths``: of the session in each slot."""
        slots, kinds = batch.slots, batch.kinds
        n = len(slots)
        if len(set(slots)) != n or list(map(lengths.get, slots)) != batch.positions or not _KINDS.issuperset(kinds):
            return None
        owners: Sequence[int] = range(n)
        if not _SILENT.isdisjoint(kinds):
            owners = [i for i in owners if kinds[i] not in _SILENT]
        raw = [k for k, i in enumerate(owners) if kinds[i] == _RAW] if _RAW in kinds else ()
        return cls(batch, owners, raw, arenas, vocab_size)

    @property
    def wants_raw(self) -> bool:
        return len(self._raw_outputs) > 0

    @lazily
    def positions(self) -> Int32s:
        positions = np.array(self._batch.positions, np.int32)
        if self._are_decodes:
            return positions
        starts = np.array([start for _, start, _ in self.steps], np.int32)
        return np.repeat(positions - starts, self._batch.lengths) + np.arange(len(self.tokens), dtype=np.int32)

    @lazily
    def outputs(self) -> Int32s:
        if self._are_decodes:
            return np.array(self.owners, np.int32)
        ends = list(accumulate(self._batch.lengths))
        return np.array([ends[i] - 1 for i in self.owners], np.int32)

    @lazily
    def _raw_rows(self) -> Sequence[Floats | None]:
        rows: list[Floats | None] = [None] * self._n_outputs
        if self._raw_outputs:
            places, arenas, vocab_size = self._batch.places(), self._arenas, self.vocab_size
            for k in self._raw_outputs:
                client, offset = places[self.owners[k]]
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

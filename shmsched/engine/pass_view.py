"""A forward pass, as the engine sees it: of the view only what is asked for is made."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from typing import Any

import numpy as np

from shmsched.dataplane.dtypes import LOGIT
from shmsched.dataplane.forward import Pass
from shmsched.dataplane.layouts import LOGIT_SIZE, SAMPLING
from shmsched.engine.batch_view import BatchView, Floats, Int32s, StepRow
from shmsched.engine.lazily import lazily
from shmsched.engine.sampling import NO_TOKEN
from shmsched.params import SamplingParams


@lru_cache(4096)
def sampling_params(packed: bytes) -> SamplingParams:
    """They are checked when made, and a session has the same ones at each step."""
    top_k, temperature, top_p, seed = SAMPLING.unpack(packed)
    return SamplingParams(temperature, top_p, top_k, seed)


class OutputSampling(Sequence[SamplingParams | None]):
    """How each output is sampled, unpacked once it is read: whether one is sampled at all costs nothing to ask (``None in
    sampling``), and an engine that does not sample asks for no more."""

    def __init__(self, this: Pass) -> None:
        self._pass = this

    @lazily
    def _params(self) -> list[SamplingParams | None]:
        owners, packed = self._pass.outputs()[1], self._pass.batch.sampling()
        # A raw step's place for them holds anything.
        raw = set(self._pass.raw)
        return [None if k in raw else sampling_params(packed[i]) for k, i in enumerate(owners)]

    def __len__(self) -> int:
        return self._pass.n_outputs

    def __contains__(self, params: object) -> bool:
        return len(self._pass.raw) > 0 if params is None else params in self._params

    def __iter__(self) -> Iterator[SamplingParams | None]:
        return iter(self._params)

    def __getitem__(self, k: Any) -> Any:
        return self._params[k]


class StepRows:
    """The rows of the last pass, for the next one, which mostly has the same: making one costs 0.15 us."""

    def __init__(self) -> None:
        self._slots: list[int] = []
        self._lengths: list[int] = []
        self._rows: tuple[StepRow, ...] = ()

    def of(self, this: Pass) -> tuple[StepRow, ...]:
        slots, lengths = this.slots, this.lengths
        if slots != self._slots or lengths != self._lengths:
            # Past the named tuple's own constructor, which is Python.
            rows = zip(slots, accumulate(lengths, initial=0), lengths, strict=False)
            self._rows = tuple(map(tuple.__new__, repeat(StepRow), rows))
            self._slots, self._lengths = slots, lengths
        return self._rows


class PassView(BatchView):
    """The view of the pass that runs. ``steps``: its rows. ``arenas``: the memory of each client's arena, by client."""

    def __init__(self, this: Pass, steps: Sequence[StepRow], arenas: Mapping[int, mmap.mmap], vocab_size: int) -> None:
        self._pass = this
        self._arenas = arenas
        self.steps = steps
        self.sampling = OutputSampling(this)
        self._begin(this.tokens, len(this.slots), this.n_outputs, this.raw, vocab_size)

    @lazily
    def positions(self) -> Int32s:
        this = self._pass
        positions = np.array(this.positions, np.int32)
        if len(this.tokens) == len(positions):
            return positions
        starts = np.array([start for _, start, _ in self.steps], np.int32)
        return np.repeat(positions - starts, this.lengths) + np.arange(len(this.tokens), dtype=np.int32)

    @lazily
    def outputs(self) -> Int32s:
        return np.array(self._pass.outputs()[0], np.int32)

    @lazily
    def _raw_rows(self) -> Sequence[Floats | None]:
        rows: list[Floats | None] = [None] * self._n_outputs
        if self._raw_outputs:
            places, (_, owners, within) = self._pass.batch.places, self._pass.outputs()
            for k in self._raw_outputs:
                client, offset = places[owners[k]]
                at = offset + within[k] * self.vocab_size * LOGIT_SIZE
                rows[k] = np.frombuffer(self._arenas[client], LOGIT, self.vocab_size, at)
        return rows

    def results(self) -> tuple[bytes, bytes, dict[int, str]]:
        """The tokens of the outputs, int32, their log-probabilities, float32, and why outputs have no result that can be used."""
        missing, ids, wrong = self.finish(), memoryview(self._ids).cast("q").tolist(), {}
        if missing or (len(self._raw_outputs) < len(ids) and (min(ids) < 0 or max(ids) >= self.vocab_size)):
            wrong = self._wrong(missing, ids)
        return struct.pack(f"<{len(ids)}i", *ids), bytes(self._logprobs), wrong

    def _wrong(self, missing: list[int], ids: list[int]) -> dict[int, str]:
        """Afterwards each of ``ids`` is in the vocabulary, or NO_TOKEN."""
        tokens, _, within = self._pass.outputs()
        found = {}
        for k, token in enumerate(ids):
            is_one = 0 <= token < self.vocab_size
            if k in missing:
                found[k] = f"the engine gave no result for row {within[k]} of this step"
            elif k in self.unusable:
                position = self.positions[tokens[k]]
                found[k] = f"row {within[k]} of its logits, for position {position}, has {self.unusable[k]}"
            elif not is_one and k not in self._raw_outputs:
                found[k] = f"the engine gave token {token}; the vocabulary has {self.vocab_size}"
            if not is_one:
                ids[k] = NO_TOKEN
        return found

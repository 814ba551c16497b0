"""One forward pass, as the engine sees it: what to run, and where the results go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shmsched.engine.sampling import sample
from shmsched.steps import SamplingParams

Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


_GIVEN = b"\1"


class StepRow(NamedTuple):
    """The tokens of one session in this batch: ``tokens[start : start + length]`` go to the session in ``slot``."""

    slot: int
    start: int
    length: int


class BatchView:
    """One batch.

    ``tokens``, ``positions``: int32, C-contiguous, shape (n_tokens,); valid until ``forward`` returns.
    ``steps``: one :class:`StepRow` for each session in the batch, decodes first.
    ``outputs``: int32, the indices into ``tokens`` whose logits are wanted, ascending.
    ``sampling``: for each output the :class:`SamplingParams` with its seed filled in, or None where raw logits are wanted.

    Give a result for every output of every step that was neither deferred nor failed, in any of three ways:
    write float32 logits into ``rows[k]``, pass many rows at once to ``put_logits``, or, for sampled outputs, sample
    yourself and pass the tokens to ``set_tokens``.
    """

    def __init__(
        self,
        tokens: Int32s,
        positions: Int32s,
        steps: Sequence[StepRow],
        outputs: Int32s,
        sampling: Sequence[SamplingParams | None],
        raw_rows: Sequence[Floats | None],
        vocab_size: int,
    ) -> None:
        """``raw_rows[k]`` is where output k's raw logits go, float32 (vocab_size,); None where the output is sampled."""
        self.tokens = tokens
        self.positions = positions
        self.steps = steps
        self.outputs = outputs
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.deferred: set[int] = set()
        self.failed: dict[int, str] = {}
        n = len(outputs)
        self.token_ids = np.empty(n, np.int64)
        self.token_ids.fill(-1)
        self.logprobs = np.empty(n, np.float32)
        self.logprobs.fill(np.nan)
        self._raw_rows = raw_rows
        self._raw_outputs = [k for k, row in enumerate(raw_rows) if row is not None]
        self._scratch: dict[int, Floats] = {}
        self._given = bytearray(n)

    @property
    def rows(self) -> OutputRowViews:
        """Made anew each time: kept here, the two would be a cycle, and keep a dead client's rows mapped."""
        return OutputRowViews(self)

    def put_logits(self, k0: int, logits: npt.NDArray[np.floating[Any]]) -> None:
        """Give the logits of outputs ``k0``, ``k0 + 1``, ...: float32 (n, vocab_size). Copied or sampled before this returns."""
        n = len(logits)
        if logits.ndim != 2 or logits.shape[1] != self.vocab_size or not 0 <= k0 <= len(self.outputs) - n:
            raise ValueError(
                f"put_logits({k0}, array of shape {logits.shape}): wanted (n, {self.vocab_size}) within {len(self.outputs)} outputs"
            )
        sampled = np.array([self._raw_rows[k0 + i] is None for i in range(n)], bool)
        for i in range(n):
            self._scratch.pop(k0 + i, None)
            raw = self._raw_rows[k0 + i]
            if raw is not None:
                raw[:] = logits[i]
        # Runs of sampled rows, so that none is copied for the sake of a raw one beside it.
        edges = np.flatnonzero(np.diff(sampled, prepend=False, append=False)).tolist()
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            self._sample(list(range(k0 + start, k0 + stop)), logits[start:stop])
        self._given[k0 : k0 + n] = _GIVEN * n

    def set_tokens(
        self,
        k0: int,
        ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        logprobs: Sequence[float] | Floats | None = None,
    ) -> None:
        """Give the sampled tokens of outputs ``k0``, ``k0 + 1``, ..., and their log-probabilities if known."""
        stop = k0 + len(ids)
        if not 0 <= k0 <= stop <= len(self.outputs):
            raise ValueError(f"set_tokens({k0}, {len(ids)} tokens): this batch has {len(self.outputs)} outputs")
        for k in self._raw_outputs:
            if k0 <= k < stop:
                raise ValueError(f"set_tokens for output {k}, which asks for raw logits")
        for k in [k for k in self._scratch if k0 <= k < stop]:
            del self._scratch[k]
        self.token_ids[k0:stop] = ids
        if logprobs is not None:
            self.logprobs[k0:stop] = logprobs
        self._given[k0:stop] = _GIVEN * len(ids)

    def defer(self, i: int) -> None:
        """No room for ``steps[i]`` now: its tokens were not taken, and it comes again later."""
        self._check_step(i)
        self.deferred.add(i)

    def fail(self, i: int, message: str) -> None:
        """``steps[i]`` cannot be done: its tokens were not taken. Its session goes on from where it stood."""
        self._check_step(i)
        self.failed[i] = str(message)

    def finish(self) -> list[int]:
        """Sample what was written through ``rows``. Returns the outputs that nothing was given for."""
        waiting = sorted(self._scratch)
        if waiting:
            self._sample(waiting, np.stack([self._scratch[k] for k in waiting]))
        return [k for k, given in enumerate(self._given) if not given] if 0 in self._given else []

    def _check_step(self, i: int) -> None:
        if not 0 <= i < len(self.steps):
            raise IndexError(f"step {i} of a batch of {len(self.steps)}")

    def _sample(self, outputs: list[int], logits: npt.NDArray[np.floating[Any]]) -> None:
        params = [self.sampling[k] or SamplingParams() for k in outputs]
        positions = self.positions[self.outputs[outputs]]
        self.token_ids[outputs], self.logprobs[outputs] = sample(logits, params, positions)

    def _row(self, k: int) -> Floats:
        self._given[k] = 1
        raw = self._raw_rows[k]
        if raw is not None:
            return raw
        if k not in self._scratch:
            self._scratch[k] = np.zeros(self.vocab_size, np.float32)
        return self._scratch[k]


class OutputRowViews:
    """``rows[k]``: a writable float32 ``(vocab_size,)`` array for output k."""

    def __init__(self, batch: BatchView) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch.outputs)

    def __getitem__(self, k: int) -> Floats:
        if not 0 <= k < len(self):
            raise IndexError(f"output {k} of a batch with {len(self)} outputs")
        return self._batch._row(k)

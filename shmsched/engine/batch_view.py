"""One forward pass, as the engine sees it: what to run, and where the results go."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shmsched.engine.sampling import NO_TOKEN, fault_of, sample
from shmsched.params import SamplingParams

Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

_GIVEN = b"\1"
_NO_TOKEN = struct.pack("<q", NO_TOKEN)
_UNKNOWN = struct.pack("<f", math.nan)


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
        self.positions = positions
        self.steps = steps
        self.outputs = outputs
        self.sampling = sampling
        self._raw_rows = raw_rows
        self._begin(
            tokens, len(steps), len(outputs), [k for k, row in enumerate(raw_rows) if row is not None], vocab_size
        )

    def _begin(self, tokens: Int32s, n_steps: int, n_outputs: int, raw_outputs: Sequence[int], vocab_size: int) -> None:
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.deferred: set[int] = set()
        self.failed: dict[int, str] = {}
        self.unusable: dict[int, str] = {}
        """Outputs that were to be sampled from logits of which no token can be drawn, and why."""
        self._n_steps = n_steps
        self._n_outputs = n_outputs
        self._raw_outputs = raw_outputs
        self._scratch: dict[int, Floats] = {}
        self._given = bytearray(n_outputs)
        self._ids = bytearray(_NO_TOKEN * n_outputs)
        self._logprobs = bytearray(_UNKNOWN * n_outputs)

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """What was sampled, for each output; -1 where nothing was, or could be."""
        return np.frombuffer(self._ids, np.int64)

    @property
    def logprobs(self) -> Floats:
        """Their log-probabilities; NaN where they are not known."""
        return np.frombuffer(self._logprobs, np.float32)

    @property
    def rows(self) -> OutputRowViews:
        """Made anew each time: kept here, the two would be a cycle, and keep a dead client's rows mapped."""
        return OutputRowViews(self)

    def put_logits(self, k0: int, logits: npt.NDArray[np.floating[Any]]) -> None:
        """Give the logits of outputs ``k0``, ``k0 + 1``, ...: float32 (n, vocab_size). Copied or sampled before this returns.

        Raw logits are handed on as they are. Of a row to be sampled some may be -inf; one that has a NaN or +inf, or nothing over
        -inf, fails its step.
        """
        n = len(logits)
        if logits.ndim != 2 or logits.shape[1] != self.vocab_size or not 0 <= k0 <= self._n_outputs - n:
            raise ValueError(
                f"put_logits({k0}, array of shape {logits.shape}): wanted (n, {self.vocab_size}) within {self._n_outputs} outputs"
            )
        sampled = np.array([self._raw_rows[k0 + i] is None for i in range(n)], bool)
        self._forget(range(k0, k0 + n))
        for i in range(n):
            if (raw := self._raw_rows[k0 + i]) is not None:
                with np.errstate(over="ignore"):
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
        """Give the sampled tokens of outputs ``k0``, ``k0 + 1``, ..., and their log-probabilities if known: NaN for one that is
        not. A token outside the vocabulary fails its step."""
        n = len(ids)
        stop = k0 + n
        if not 0 <= k0 <= stop <= self._n_outputs:
            raise ValueError(f"set_tokens({k0}, {n} tokens): this batch has {self._n_outputs} outputs")
        for k in self._raw_outputs:
            if k0 <= k < stop:
                raise ValueError(f"set_tokens for output {k}, which asks for raw logits")
        if self._scratch or self.unusable:
            self._forget(range(k0, stop))
        self._ids[8 * k0 : 8 * stop] = _packed(ids)
        if logprobs is not None:
            known = logprobs.tolist() if isinstance(logprobs, np.ndarray) else logprobs
            try:
                self._logprobs[4 * k0 : 4 * stop] = struct.pack(f"<{n}f", *known)
            except (struct.error, OverflowError, TypeError):
                with np.errstate(over="ignore"):
                    self.logprobs[k0:stop] = logprobs
        self._given[k0:stop] = _GIVEN * n

    def _forget(self, outputs: Iterable[int]) -> None:
        """These get another result."""
        for k in outputs:
            self._scratch.pop(k, None)
            self.unusable.pop(k, None)

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
        if self._scratch:
            waiting = sorted(self._scratch)
            self._sample(waiting, np.stack([self._scratch[k] for k in waiting]))
        return [k for k, given in enumerate(self._given) if not given] if 0 in self._given else []

    def _check_step(self, i: int) -> None:
        if not 0 <= i < self._n_steps:
            raise IndexError(f"step {i} of a batch of {self._n_steps}")

    def _sample(self, outputs: list[int], logits: npt.NDArray[np.floating[Any]]) -> None:
        params = [self.sampling[k] or SamplingParams() for k in outputs]
        positions = self.positions[self.outputs[outputs]]
        tokens, logprobs = sample(logits, params, positions)
        self.token_ids[outputs], self.logprobs[outputs] = tokens, logprobs
        self._forget(outputs)
        if tokens.min() < 0:
            self.unusable |= {
                k: fault_of(row) for k, token, row in zip(outputs, tokens, logits, strict=True) if token < 0
            }

    def _row(self, k: int) -> Floats:
        self._given[k] = 1
        raw = self._raw_rows[k]
        if raw is not None:
            return raw
        if k not in self._scratch:
            self._scratch[k] = np.zeros(self.vocab_size, np.float32)
        return self._scratch[k]


def _packed(ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bytes:
    """Token ids as int64. Raises ValueError for what is no whole number: half a token is not the token below."""
    # Without numpy where that is possible: between batches the other processes have the caches, and then a call into it costs 3 to
    # 10 us, whatever it does.
    listed = ids.tolist() if isinstance(ids, np.ndarray) else ids
    try:
        return struct.pack(f"<{len(listed)}q", *listed)
    except struct.error:
        with np.errstate(invalid="ignore"):
            given = np.asarray(ids, np.float64)
            whole = given.astype(np.int64)
        if given.ndim != 1 or not np.array_equal(whole, given):
            raise ValueError(f"set_tokens: token ids must be whole numbers, not {ids!r}") from None
        return whole.tobytes()


class OutputRowViews:
    """``rows[k]``: a writable float32 ``(vocab_size,)`` array for output k."""

    def __init__(self, batch: BatchView) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return self._batch._n_outputs

    def __getitem__(self, k: int) -> Floats:
        if not 0 <= k < self._batch._n_outputs:
            raise IndexError(f"output {k} of a batch with {self._batch._n_outputs} outputs")
        return self._batch._row(k)

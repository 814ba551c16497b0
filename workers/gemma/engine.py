"""The gemma engine: Gemma 3 in numpy, from a GGUF file."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from shmsched.engine import BatchView, Engine, EngineInfo, Limits
from shmsched.engine.options import whole
from shmsched.engine.taken import TakenSteps, runnable
from shmsched.errors import EngineStartError
from shmsched.workers.gemma.attention import Span
from shmsched.workers.gemma.config import read_config
from shmsched.workers.gemma.files import cache_directory, demo_file
from shmsched.workers.gemma.kv_blocks import BLOCK_TOKENS, KvBlocks
from shmsched.workers.gemma.model import GemmaModel
from shmsched.workers.gemma.weights import load_weights
from shmsched.workers.gguf.file import GgufFile
from shmsched.workers.gguf.tokenizer import stop_tokens

Floats = npt.NDArray[np.float32]

_HEAD_ROWS = 64
"""Rows of logits computed at a time: 67 MB with 262,144 pieces, and enough for the head to run at its full speed."""


class Gemma(Engine):
    """Options: ``path`` of a GGUF file (default: the weights of the ``demo`` extra); ``max_sessions``;
    ``max_session_tokens`` (at most the model's context); ``kv_tokens``, the room for tokens of all sessions together
    (default: enough for every session at its longest); ``cache``, the directory for dequantized weights; ``threads``
    for BLAS (default: its own choice)."""

    def __init__(
        self,
        path: str = "",
        *,
        max_sessions: int = 16,
        max_session_tokens: int = 4096,
        kv_tokens: int | None = None,
        cache: str = "",
        threads: int | None = None,
    ) -> None:
        whole("gemma", "max_sessions", max_sessions, 1, 2**31 - 1)
        whole("gemma", "max_session_tokens", max_session_tokens, 1, 2**31 - 1)
        if kv_tokens is not None:
            whole("gemma", "kv_tokens", kv_tokens, 1, 2**31 - 1, where="(leave it out for room for every session)")
        if threads is not None:
            whole("gemma", "threads", threads, 1, 2**16, where="(leave it out for BLAS's own choice)")
        self._cache = cache_directory(cache)
        self._file = GgufFile(path or demo_file(self._cache))
        self._config = read_config(self._file)
        self._threads = threads
        name = self._file.text("general.name", "gemma-3")
        self.info = EngineInfo(
            model=re.sub(r"\s+", "-", name.strip()).lower(),
            vocab_size=self._config.vocab_size,
            max_sessions=max_sessions,
            max_session_tokens=min(max_session_tokens, self._config.context_length),
            tokenizer=f"gguf:{self._file.path}",
            stop_tokens=stop_tokens(self._file),
        )
        most = max_sessions * _in_blocks(self.info.max_session_tokens)
        self._n_blocks = min(most, most if kv_tokens is None else _in_blocks(kv_tokens))
        self._lengths: dict[int, int] = {}

    def start(self, limits: Limits) -> None:
        if self._threads is not None:
            _limit_threads(self._threads)
        c = self._config
        weights = load_weights(self._file, c, self._cache)
        # Embedding rows are read from the GGUF file: the head's weights are the same, but lie the other way round.
        self._model = GemmaModel(c, weights, lambda tokens: self._file.rows("token_embd.weight", tokens))
        self._kv = KvBlocks(self._n_blocks, c.n_layers, c.n_kv_heads, c.head_dim)
        self._logits = np.empty((_HEAD_ROWS, c.vocab_size), np.float32)

    def open_session(self, slot: int, options: bytes) -> None:
        self._lengths[slot] = 0

    def rewind(self, slot: int, length: int) -> None:
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(
                f"rewind to {length} of the session in slot {slot}, which has {self._lengths[slot]} tokens"
            )
        self._lengths[slot] = length
        self._kv.truncate(slot, length)

    def fork_session(self, parent: int, slot: int, length: int) -> None:
        if not 0 <= length <= self._lengths[parent]:
            raise ValueError(
                f"fork of {length} tokens of the session in slot {parent}, which has {self._lengths[parent]}"
            )
        self._kv.share(parent, slot, length)
        self._lengths[slot] = length

    def close_session(self, slot: int) -> None:
        self._kv.truncate(slot, 0)
        del self._lengths[slot]

    def forward(self, batch: BatchView) -> None:
        possible = runnable(batch, self._lengths, self.info)
        taken = TakenSteps.of(batch, [i for i in possible if self._reserve(batch, i)])
        if not taken.steps:
            return
        spans = [Span(slot, row, length, self._lengths[slot]) for slot, row, length in taken.steps]
        hidden = self._model.forward(taken.tokens, taken.positions, spans, self._kv, taken.outputs)
        for span in spans:
            self._lengths[span.slot] += span.length
        for first, run in taken.runs():
            for start in range(run.start, run.stop, _HEAD_ROWS):
                part = hidden[start : min(start + _HEAD_ROWS, run.stop)]
                batch.put_logits(first + start - run.start, self._model.logits(part, self._logits))

    def _reserve(self, batch: BatchView, i: int) -> bool:
        slot, _, length = batch.steps[i]
        held = self._lengths[slot]
        if self._kv.reserve(slot, held, held + length):
            return True
        batch.defer(i)
        return False


def _in_blocks(n_tokens: int) -> int:
    return -(-n_tokens // BLOCK_TOKENS)


def _limit_threads(n: int) -> None:
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        raise EngineStartError("gemma's option threads= needs threadpoolctl: pip install 'shmsched[gemma]'") from None
    threadpool_limits(limits=n, user_api="blas")

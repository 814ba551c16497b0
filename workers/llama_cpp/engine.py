"""The llama_cpp engine: any GGUF model that llama.cpp runs, one ``llama_decode`` for each batch."""

from __future__ import annotations

import os

import numpy as np

from shmsched.engine import BatchView, Engine, EngineInfo, Limits
from shmsched.engine.options import whole
from shmsched.engine.taken import TakenSteps, runnable
from shmsched.errors import Unsupported
from shmsched.params import SamplingParams
from shmsched.workers.llama_cpp.context import Context
from shmsched.workers.llama_cpp.library import Model


class LlamaCpp(Engine):
    """Options: ``path`` of a GGUF file; ``n_ctx``, the tokens that all sessions together can hold; ``max_sessions``;
    ``threads`` (default: one for each core that this process may use); ``gpu_layers``, the layers to put on a GPU if llama.cpp
    was built for one (default: all); ``logprobs``, whether greedy tokens come with their log-probabilities, which take 0.7 ms
    each over a vocabulary of 262,144 (default: true)."""

    def __init__(
        self,
        path: str,
        *,
        n_ctx: int = 16384,
        max_sessions: int = 16,
        threads: int | None = None,
        gpu_layers: int = -1,
        logprobs: bool = True,
    ) -> None:
        whole("llama_cpp", "n_ctx", n_ctx, 1, 2**31 - 1)
        whole("llama_cpp", "max_sessions", max_sessions, 1, 2**31 - 1)
        whole("llama_cpp", "gpu_layers", gpu_layers, -1, 2**31 - 1, where="(-1: all)")
        if threads is not None:
            whole("llama_cpp", "threads", threads, 1, 2**16, where="(leave it out for one for each core)")
        header = Model(path, vocab_only=True)
        self._path = str(header.path)
        self._n_ctx = n_ctx
        self._own_context = header.context_length
        self._threads = threads or len(os.sched_getaffinity(0))
        self._gpu_layers = gpu_layers
        self._logprobs = logprobs
        self.info = EngineInfo(
            model=header.name,
            vocab_size=header.vocab_size,
            max_sessions=max_sessions,
            max_session_tokens=min(n_ctx, self._own_context),
            tokenizer=f"llama_cpp:{self._path}",
            rewinds_anywhere=not header.has_state,
            stop_tokens=header.stop_tokens,
        )
        header.close()
        self._lengths: dict[int, int] = {}

    def start(self, limits: Limits) -> None:
        self._model = Model(self._path, gpu_layers=self._gpu_layers)
        self._context = Context(
            self._model,
            n_ctx=self._n_ctx,
            n_sequences=self.info.max_sessions,
            batch_tokens=limits.max_batch_size,
            threads=self._threads,
        )
        # The first pass brings the weights into memory.
        one = np.zeros(1, np.int32)
        self._context.decode(one, one, one, one)
        self._context.truncate(0, 0)

    def open_session(self, slot: int, options: bytes) -> None:
        self._lengths[slot] = 0

    def rewind(self, slot: int, length: int) -> None:
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(
                f"rewind to {length} of the session in slot {slot}, which has {self._lengths[slot]} tokens"
            )
        if not self._context.truncate(slot, length):
            raise Unsupported(f"{self.info.model} keeps a state that cannot go back, except to the beginning")
        self._lengths[slot] = length

    def fork_session(self, parent: int, slot: int, length: int) -> None:
        if not 0 <= length <= self._lengths[parent]:
            raise ValueError(
                f"fork of {length} tokens of the session in slot {parent}, which has {self._lengths[parent]}"
            )
        if not self._context.copy(parent, slot, length):
            held = self._lengths[parent]
            raise Unsupported(
                f"{self.info.model} keeps a state that can be forked only whole: {held} tokens, not {length}"
            )
        self._lengths[slot] = length

    def close_session(self, slot: int) -> None:
        self._context.truncate(slot, 0)
        del self._lengths[slot]

    def close(self) -> None:
        if hasattr(self, "_context"):
            self._context.close()
            self._model.close()

    def forward(self, batch: BatchView) -> None:
        limit = f"n_ctx is {self._n_ctx}, and the model's own context {self._own_context}"
        possible = runnable(batch, self._lengths, self.info, limit)
        while possible:
            taken = TakenSteps.of(batch, possible)
            slots = np.repeat([step.slot for step in taken.steps], [step.length for step in taken.steps])
            if self._context.decode(taken.tokens, taken.positions, slots, taken.outputs):
                self._finish(batch, taken)
                return
            # Nothing was taken. Decodes come first in a batch, so prefills wait before any of them does.
            batch.defer(possible.pop())

    def _finish(self, batch: BatchView, taken: TakenSteps) -> None:
        for slot, _, length in taken.steps:
            self._lengths[slot] += length
        if len(taken.outputs):
            logits = self._context.logits(len(taken.outputs))
            for first, run in taken.runs():
                rows = logits[run]
                if self._logprobs or not all(map(_is_greedy, batch.sampling[first : first + len(rows)])):
                    batch.put_logits(first, rows)
                    continue
                tokens = rows.argmax(axis=1)
                if np.isfinite(rows[np.arange(len(rows)), tokens]).all():
                    batch.set_tokens(first, tokens)
                else:
                    # A NaN counts as the largest: what cannot be sampled from is left for the batch to name.
                    batch.put_logits(first, rows)


def _is_greedy(sampling: SamplingParams | None) -> bool:
    return sampling is not None and sampling.temperature == 0.0

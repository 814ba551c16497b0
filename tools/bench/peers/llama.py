"""A bare loop around ``llama_decode``: one process, one batch of all sessions, the greedy token of each row."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import llama_cpp.llama_cpp as llama
import numpy as np

from shmsched.tools.bench.crew import BenchFault, Crew
from shmsched.tools.bench.load import Rounds
from shmsched.tools.bench.model import PROMPT_TOKENS, prompt
from shmsched.tools.bench.plan import Plan, Round, Tally

N_CTX = 16_384
"""As the engine's."""


_quiet = llama.llama_log_callback(lambda *_: None)


def start(plan: Plan, crew: Crew, stack: ExitStack) -> None:
    @contextmanager
    def open_client(index: int) -> Iterator[Rounds]:
        yield Loop(plan).run

    crew.fork(open_client)


class Loop:
    """The sessions are sequences of one context."""

    def __init__(self, plan: Plan) -> None:
        self._n = plan.sessions
        llama.llama_log_set(_quiet, None)
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(plan.model.encode(), llama.llama_model_default_params())
        if not model:
            raise BenchFault(f"llama.cpp cannot load {plan.model}")
        params = llama.llama_context_default_params()
        params.n_ctx = N_CTX
        params.n_seq_max = self._n
        params.n_batch = params.n_ubatch = self._n * PROMPT_TOKENS
        params.n_threads = params.n_threads_batch = plan.threads
        params.kv_unified = True
        params.swa_full = True
        self._context = llama.llama_init_from_model(model, params)
        self._memory = llama.llama_get_memory(self._context)
        self._vocab = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)))
        self._batch = llama.llama_batch_init(self._n * PROMPT_TOKENS, 0, 1)

    def run(self, when: Round) -> Tally:
        llama.llama_memory_clear(self._memory, True)
        tokens = self._decode([prompt(i) for i in range(self._n)], 0)
        position = PROMPT_TOKENS
        steps = 0
        began = 0.0
        while (now := time.monotonic()) < when.end or not began:
            if not began and now >= when.start:
                began, steps = now, 0
            tokens = self._decode([[token] for token in tokens], position)
            position += 1
            steps += self._n
        return Tally(steps=steps, seconds=now - began, wrong=0, p50_us=0.0)

    def _decode(self, steps: list[list[int]], position: int) -> list[int]:
        """Append to each sequence its tokens. Returns the greedy token after each."""
        batch = self._batch
        n = 0
        for sequence, tokens in enumerate(steps):
            for i, token in enumerate(tokens):
                batch.token[n] = token
                batch.pos[n] = position + i
                batch.n_seq_id[n] = 1
                batch.seq_id[n][0] = sequence
                batch.logits[n] = i == len(tokens) - 1
                n += 1
        batch.n_tokens = n
        status = llama.llama_decode(self._context, batch)
        if status != 0:
            raise BenchFault(f"llama_decode returned {status} for a batch of {n} tokens")
        logits = np.ctypeslib.as_array(llama.llama_get_logits(self._context), (len(steps), self._vocab))
        return [int(row.argmax()) for row in logits]

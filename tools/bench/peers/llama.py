"""A bare loop around ``llama_decode``: one process, one batch of all sessions, the greedy token of each row."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext

import numpy as np
import numpy.typing as npt

from shmsched.tools.bench.crew import BenchFault, Crew
from shmsched.tools.bench.load import Watch
from shmsched.tools.bench.model import PROMPT_TOKENS, prompt
from shmsched.tools.bench.plan import Plan, Round, Tally
from shmsched.workers.llama_cpp.context import Context
from shmsched.workers.llama_cpp.library import Model

N_CTX = 16_384
"""As the engine's."""


def start(plan: Plan, crew: Crew, stack: ExitStack) -> None:
    crew.fork(lambda _: nullcontext(Loop(plan).run))


class Loop:
    """The sessions are sequences of one context."""

    def __init__(self, plan: Plan) -> None:
        self._n = n = plan.sessions
        self._context = Context(
            Model(plan.model), n_ctx=N_CTX, n_sequences=n, batch_tokens=n * PROMPT_TOKENS, threads=plan.threads
        )

    def run(self, when: Round) -> Tally:
        for sequence in range(self._n):
            self._context.truncate(sequence, 0)
        tokens = self._decode(np.array([prompt(i) for i in range(self._n)]), 0)
        position = PROMPT_TOKENS
        watch = Watch(when)
        while watch.goes_on():
            tokens = self._decode(tokens[:, None], position)
            position += 1
            watch.steps += self._n
        return watch.tally(wrong=0)

    def _decode(self, tokens: npt.NDArray[np.int64], position: int) -> npt.NDArray[np.int64]:
        """Append to each sequence its row of tokens. Returns the greedy token after each."""
        n, length = tokens.shape
        positions = np.tile(np.arange(position, position + length), n)
        sequences = np.repeat(np.arange(n), length)
        if not self._context.decode(tokens.ravel(), positions, sequences, np.arange(length - 1, n * length, length)):
            raise BenchFault(f"llama_decode has no room for {n} sequences of {position + length} tokens")
        greedy: npt.NDArray[np.int64] = self._context.logits(n).argmax(axis=1)
        return greedy

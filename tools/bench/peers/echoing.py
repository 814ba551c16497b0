"""The engine of the peers: echo's hash and echo's rows, over plain lists."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shmsched.tools.bench.plan import Plan
from shmsched.workers.echo import MASK, MULTIPLIER, PEAK


class Echoing:
    """Sessions are any hashable; each is a rolling hash."""

    def __init__(self, plan: Plan) -> None:
        self._vocab = plan.vocab
        self._step_s = plan.step_us / 1e6
        self._hashes: dict[object, int] = defaultdict(int)
        self._row = ((np.arange(plan.vocab, dtype=np.int64) * 40503) & 0xFFFF).astype(np.float32)

    def forward(self, sessions: Sequence[object], tokens: Sequence[Sequence[int]]) -> list[int]:
        """A token for each step."""
        if self._step_s:
            time.sleep(self._step_s)
        hashes, vocab = self._hashes, self._vocab
        answers = []
        for session, step in zip(sessions, tokens, strict=True):
            h = hashes[session]
            for t in step:
                h = (MULTIPLIER * h + t + 1) & MASK
            hashes[session] = h
            answers.append((h >> 33) % vocab)
        return answers

    def fill(self, row: npt.NDArray[np.float32], token: int) -> None:
        """The raw logits that say ``token``, into float32 (vocab,)."""
        row[:] = self._row
        row[token] = PEAK

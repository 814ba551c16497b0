"""An engine that computes no model, and whose every answer can be checked.

It keeps a rolling hash of each session's tokens and answers from it. A client that keeps the same hash can tell any lost,
repeated, reordered or crossed step from the answer alone.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable

import numpy as np

from shmsched.arguments import LONGEST_S
from shmsched.engine import BatchView, Engine, EngineInfo
from shmsched.engine.options import number, whole

MULTIPLIER = 6364136223846793005
MASK = 2**64 - 1
PEAK = 131072.0
MOST_VOCAB = 2**24
"""Rows of logits of more would take 64 MB each, and two of them are kept."""


def advance(h: int, tokens: Iterable[int]) -> int:
    """The rolling hash after ``tokens``, from ``h``; it starts at 0. (Knuth's MMIX multiplier; any odd one would do.)"""
    for t in tokens:
        h = (MULTIPLIER * h + t + 1) & MASK
    return h


def answer(h: int, vocab: int) -> int:
    """The token that echo answers with where the rolling hash is ``h``."""
    return (h >> 33) % vocab


class Echo(Engine):
    """Options: ``vocab``; ``step_us`` and ``token_us``, the cost of a forward pass and of each of its tokens (slept, not
    spun); ``max_sessions``; ``max_session_tokens``."""

    def __init__(
        self,
        *,
        vocab: int = 32000,
        step_us: float = 0.0,
        token_us: float = 0.0,
        max_sessions: int = 1024,
        max_session_tokens: int = 131072,
        model: str = "echo",
    ) -> None:
        vocab = whole("echo", "vocab", vocab, 1, MOST_VOCAB)
        max_sessions = whole("echo", "max_sessions", max_sessions, 1, 2**31 - 1)
        max_session_tokens = whole("echo", "max_session_tokens", max_session_tokens, 1, 2**31 - 1)
        step_us = number("echo", "step_us", step_us, 0, LONGEST_S * 1e6)
        token_us = number("echo", "token_us", token_us, 0, LONGEST_S * 1e6)
        self.info = EngineInfo(
            model=model, vocab_size=vocab, max_sessions=max_sessions, max_session_tokens=max_session_tokens
        )
        self._step_s = step_us / 1e6
        self._token_s = token_us / 1e6
        # For each slot the hash after each number of tokens: rewinding is cutting the list.
        self._hashes: dict[int, array[int]] = {}
        self._row = ((np.arange(vocab, dtype=np.int64) * 40503) & 0xFFFF).astype(np.float32)

    def open_session(self, slot: int, options: bytes) -> None:
        self._hashes[slot] = array("Q", [0])

    def rewind(self, slot: int, length: int) -> None:
        del self._hashes[slot][length + 1 :]

    def fork_session(self, parent: int, slot: int, length: int) -> None:
        self._hashes[slot] = self._hashes[parent][: length + 1]

    def close_session(self, slot: int) -> None:
        del self._hashes[slot]

    def forward(self, batch: BatchView) -> None:
        vocab, hashes_of = self.info.vocab_size, self._hashes
        tokens, steps = batch.tokens.tolist(), batch.steps
        cost = self._step_s + self._token_s * len(tokens)
        if cost > 0:
            time.sleep(cost)
        answers: list[int] = []
        if len(steps) == len(tokens):
            # Decodes: 0.1 us less for each without a loop of one turn.
            for row, t in zip(steps, tokens, strict=True):
                hashes = hashes_of[row.slot]
                h = (MULTIPLIER * hashes[-1] + t + 1) & MASK
                hashes.append(h)
                answers.append((h >> 33) % vocab)
        else:
            for slot, start, length in steps:
                hashes = hashes_of[slot]
                h = hashes[-1]
                for t in tokens[start : start + length]:
                    h = (MULTIPLIER * h + t + 1) & MASK
                    hashes.append(h)
                    answers.append((h >> 33) % vocab)
        rows, wanted = batch.rows, answers
        if len(rows) != len(tokens):
            wanted = [answers[k] for k in batch.outputs.tolist()]
        logprob = self.logprob()
        if None not in batch.sampling:
            # No temperature moves the peak: it stands 65,537 above the next value.
            batch.set_tokens(0, wanted, [logprob] * len(wanted))
            return
        template = self._row
        for k, (token, sampling) in enumerate(zip(wanted, batch.sampling, strict=True)):
            if sampling is None:
                logits = rows[k]
                logits[:] = template
                logits[token] = PEAK
            else:
                batch.set_tokens(k, (token,), (logprob,))

    def logprob(self) -> float:
        """That of each token of the batch at hand: there is no doubt about any."""
        return 0.0

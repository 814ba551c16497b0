"""What echo answers, for tests that check every token."""

from __future__ import annotations

from shmsched.workers.echo import advance, answer

VOCAB = 1000


def echoes(fed: list[int], n: int) -> list[int]:
    """The ``n`` tokens that echo gives after ``fed``, each fed back."""
    h = advance(0, fed)
    tokens = []
    for _ in range(n):
        tokens.append(answer(h, VOCAB))
        h = advance(h, tokens[-1:])
    return tokens

"""What echo answers, for tests that check every token."""

from __future__ import annotations

from shmsched.workers.echo import advance, answer

VOCAB = 1000


def echoes(fed: list[int], n: int, vocab: int = VOCAB) -> list[int]:
    """The ``n`` tokens that echo gives after ``fed``, each fed back."""
    h = advance(0, fed)
    tokens = []
    for _ in range(n):
        tokens.append(answer(h, vocab))
        h = advance(h, tokens[-1:])
    return tokens


def prompt_that_meets(token: int, avoiding: range) -> tuple[list[int], list[int]]:
    """A prompt of two tokens whose next 20 have ``token`` in them, and none of ``avoiding`` before it; and those 20."""
    return next(
        ([a, b], expected)
        for a in range(200, 400)
        for b in range(200, 400)
        if token in (expected := echoes([a, b], 20)) and not set(avoiding) & {*expected[: expected.index(token)]}
    )

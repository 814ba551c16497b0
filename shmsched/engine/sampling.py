"""Drawing tokens from logits.

A token depends on its row, its parameters (the seed among them) and its position: never on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmsched.steps import SamplingParams

_MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on ``seed`` and ``position`` alone (two rounds of SplitMix64, Steele et al. 2014)."""
    z = seed
    # The seed is mixed before the position comes in, else seed 2 would give what seed 1 gives one position later.
    for word in (0, position):
        z = (z + 0x9E3779B97F4A7C15 + word) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return (z >> 11) * 2.0**-53


def sample(
    logits: npt.NDArray[np.floating[Any]], params: Sequence[SamplingParams], positions: npt.NDArray[np.integer[Any]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """One token for each row of ``logits``, shape (n, vocab).

    Returns the tokens, int64 (n,), and their log-probabilities under the row's own softmax (temperature 1, nothing cut
    off), float32 (n,).
    """
    chosen = np.argmax(logits, axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        for i, p in enumerate(params):
            # Where one logit is infinite it is certain; where none is a number there is nothing to draw from.
            if p.temperature > 0.0 and np.isfinite(logits[i, chosen[i]]):
                chosen[i] = _draw(logits[i], p, uniform(p.seed or 0, int(positions[i])))
        return chosen, _logprobs(logits, chosen)


def _draw(row: npt.NDArray[np.floating[Any]], params: SamplingParams, u: float) -> int:
    """The token at quantile ``u`` of the distribution that ``params`` leaves of ``row``."""
    candidates = np.arange(len(row))
    if 0 < params.top_k < len(row):
        # A stable sort makes the cut exact where values tie: the lowest indices stay.
        kth = np.partition(row, len(row) - params.top_k)[len(row) - params.top_k]
        candidates = np.flatnonzero(row >= kth)
        order = np.argsort(-row[candidates], kind="stable")[: params.top_k]
        candidates = np.sort(candidates[order])
    scaled = (row[candidates].astype(np.float64) - float(row.max())) / params.temperature
    weights = np.exp(scaled)
    if params.top_p < 1.0:
        # All tokens of less than this together hold less than 1 - top_p, so none of them is in the nucleus, and sorting
        # the rest is enough: of 262,144 tokens that is 1 ms and not 46.
        total = float(weights.sum())
        likely = np.flatnonzero(weights >= (1.0 - params.top_p) * total / len(weights))
        order = likely[np.argsort(-weights[likely], kind="stable")]
        mass = np.cumsum(weights[order])
        kept = np.sort(order[: int(np.searchsorted(mass, params.top_p * total)) + 1])
        candidates, weights = candidates[kept], weights[kept]
    mass = np.cumsum(weights)
    return int(candidates[min(int(np.searchsorted(mass, u * mass[-1], side="right")), len(candidates) - 1)])


def _logprobs(logits: npt.NDArray[np.floating[Any]], chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    top = logits.max(axis=1, keepdims=True)
    shifted = np.subtract(logits, top, dtype=np.float32)
    picked = shifted[np.arange(len(chosen)), chosen]
    np.exp(shifted, out=shifted)
    return np.asarray(picked - np.log(shifted.sum(axis=1, dtype=np.float64)), np.float32)

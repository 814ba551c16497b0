"""Distributions over the vocabulary, and lossless rejection sampling from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmsched.engine.sampling import UnusableLogits, candidates, uniform
from shmsched.errors import InvalidRequest
from shmsched.params import SamplingParams

_JUDGING = 0x3D6E
_REPLACING = 0x8E91
"""Mixed into the seed: what a draft is judged by, what replaces it, and what it was drawn with are independent."""


def probabilities(row: npt.NDArray[np.floating[Any]], sampling: SamplingParams) -> npt.NDArray[np.float64]:
    """What tokens are drawn from under ``sampling``, given a row of logits: float64 (vocab,), adding up to 1.

    Raises UnusableLogits where that is nothing.
    """
    tokens, weights = candidates(row, sampling)
    whole = np.zeros(len(row))
    whole[tokens] = weights
    whole /= whole.sum()
    return whole


def draw(distribution: npt.NDArray[np.float64], u: float) -> int:
    """The token at quantile ``u`` of a distribution that need not add up to 1."""
    mass = np.cumsum(distribution)
    token = int(np.searchsorted(mass, u * mass[-1], side="right"))
    # Rounding may lead beyond the last token that has any weight.
    return min(token, int(np.flatnonzero(distribution)[-1]))


def verify(
    rows: npt.NDArray[np.floating[Any]],
    drafted: Sequence[int],
    distributions: Sequence[npt.NDArray[np.float64]],
    sampling: SamplingParams,
    position: int,
) -> list[int]:
    """The accepted drafts and one token more, together distributed as if they had been drawn from ``rows`` alone.

    rows: the model's logits, (len(drafted) + 1, vocab), the first for the token at ``position``. distributions: what each draft
    was drawn from. Speculative sampling (Leviathan et al. 2023, Chen et al. 2023): draft d is accepted with probability
    min(1, p(d) / q(d)), and where it is not, a token is drawn from max(0, p - q) in its place. Raises UnusableLogits where no token
    can be drawn from a row, and InvalidRequest where no draft can have been drawn from its distribution.
    """
    seed = sampling.seed or 0
    for i, (token, q) in enumerate(zip(drafted, distributions, strict=True)):
        p = _of_row(rows, i, sampling, position)
        if q.shape != p.shape or not q[token] > 0.0:
            raise InvalidRequest(
                f"drafted token {token} was drawn from a distribution of shape {q.shape} that does not give it a probability"
                f" above 0; one of shape {p.shape} that does is wanted"
            )
        if uniform(seed ^ _JUDGING, position + i) * q[token] < p[token]:
            continue
        rest = np.maximum(p - q, 0.0)
        if not np.isfinite(rest.sum()):
            raise InvalidRequest(f"drafted token {token} was drawn from a distribution that has a NaN or an infinity")
        return [*drafted[:i], draw(rest if rest.any() else p, uniform(seed ^ _REPLACING, position + i))]
    n = len(drafted)
    return [*drafted, draw(_of_row(rows, n, sampling, position), uniform(seed, position + n))]


def _of_row(
    rows: npt.NDArray[np.floating[Any]], i: int, sampling: SamplingParams, position: int
) -> npt.NDArray[np.float64]:
    try:
        return probabilities(rows[i], sampling)
    except UnusableLogits as e:
        raise UnusableLogits(f"row {i} of its logits, for position {position + i}, has {e}") from None

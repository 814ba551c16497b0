"""Drawing tokens from logits.

A token depends on its row, its parameters (the seed among them) and its position: never on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmsched.params import SamplingParams

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.intp]

_MASK = 2**64 - 1
_BLOCK_VALUES = 1 << 18
"""Rows are worked on in blocks of this many values, 1 MB: several passes over what is in the cache cost a third of the same
over 32 rows of a vocabulary of 262,144."""
_SAFE = (-40.0, 70.0)
"""Between these tops float32 holds exp of a whole row, and the sum of 262,144 such, without a loss."""
_LEAST_TEMPERATURE = 1e-30
"""From here on float32 holds every difference of two logits over the temperature, or an infinity whose exp is the same."""
NO_TOKEN = -1
"""In the place of a token, for a row from which none can be drawn."""
_LEAST_COLUMNS = 4096
_GROWING = (64, 512, 8192)
_PART = 512


class UnusableLogits(ValueError):
    """No token can be drawn from a row. The message says why."""


def fault_of(row: npt.NDArray[np.floating[Any]]) -> str:
    """Why no token can be drawn from a row of logits; empty if one can. -inf is a token that is impossible: fine for some."""
    n = len(row)
    if len(found := np.flatnonzero(np.isnan(row))):
        return f"NaN at index {found[0]} of {n}{_and_more(found)}"
    with np.errstate(over="ignore"):
        narrow = np.asarray(row, np.float32)
    if len(found := np.flatnonzero(narrow == np.inf)):
        value = "+inf" if np.isinf(row[found[0]]) else f"{row[found[0]]:g}, which float32 cannot hold,"
        return f"{value} at index {found[0]} of {n}{_and_more(found)}"
    return "" if np.isfinite(narrow).any() else f"-inf at every index of {n}"


def _and_more(found: Ints) -> str:
    return f" and {len(found) - 1} more" if len(found) > 1 else ""


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
) -> tuple[npt.NDArray[np.int64], Floats]:
    """One token for each row of ``logits``, shape (n, vocab).

    Returns the tokens, int64 (n,), and their log-probabilities under the row's own softmax (temperature 1, nothing cut
    off), float32 (n,); NO_TOKEN and NaN for a row from which no token can be drawn, of which ``fault_of`` says why.
    """
    n, vocab = logits.shape
    tokens, logprobs = np.empty(n, np.int64), np.empty(n, np.float32)
    step = max(1, _BLOCK_VALUES // vocab)
    room = np.empty((min(n, step), vocab), np.float32)
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        for start in range(0, n, step):
            rows = slice(start, start + step)
            block = logits[rows]
            tokens[rows], logprobs[rows] = _sample_block(block, params[rows], positions[rows], room[: len(block)], step)
    return tokens, logprobs


def _sample_block(
    block: npt.NDArray[np.floating[Any]],
    params: Sequence[SamplingParams],
    positions: npt.NDArray[np.integer[Any]],
    room: Floats,
    step: int,
) -> tuple[npt.NDArray[np.int64], Floats]:
    each = np.arange(len(block))
    chosen = block.argmax(axis=1)
    tops = np.asarray(block[each, chosen], np.float32)
    # A NaN counts as the largest, so what is wrong with a row shows in its top: no pass over the row for this.
    usable = np.isfinite(tops)
    for i, p in enumerate(params):
        if p.temperature > 0.0 and usable[i]:
            row = np.asarray(block[i], np.float32)
            chosen[i] = _draw(row, tops[i], p, uniform(p.seed or 0, int(positions[i])), room[i])
    if step == 1 and _SAFE[0] < tops[0] < _SAFE[1]:
        # exp can do without a pass that takes the top off first. (Where a block has several rows, this row's digits must
        # not depend on the others' tops.)
        np.exp(block, out=room, dtype=np.float32)
        tops[0] = 0.0
    else:
        np.subtract(block, tops[:, None], out=room, dtype=np.float32)
        np.exp(room, out=room)
    logprobs = np.asarray(block[each, chosen] - tops - np.log(room.sum(axis=1)), np.float32)
    if not usable.all():
        chosen[~usable], logprobs[~usable] = NO_TOKEN, np.nan
    return chosen, logprobs


def candidates(row: npt.NDArray[np.floating[Any]], params: SamplingParams) -> tuple[Ints, Floats]:
    """The tokens that ``params`` leaves of a row of logits, ascending, and their weights, which need not add up to 1.

    The temperature must be over 0. Raises UnusableLogits where no token can be drawn.
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        given, row = row, np.asarray(row, np.float32)
        top = row.max()
        if not np.isfinite(top):
            raise UnusableLogits(fault_of(given))
        tokens, weights = _left(row, top, params, np.empty_like(row))
    return np.arange(len(row)) if tokens is None else tokens, weights


def _draw(row: Floats, top: np.float32, params: SamplingParams, u: float, room: Floats) -> int:
    """The token at quantile ``u`` of the distribution that ``params`` leaves of ``row``, in the order of the vocabulary."""
    tokens, weights = _left(row, top, params, room)
    index = _quantile(weights, u)
    return index if tokens is None else int(tokens[index])


def _left(row: Floats, top: np.float32, params: SamplingParams, room: Floats) -> tuple[Ints | None, Floats]:
    """What ``params`` leaves of ``row``: tokens, ascending (None: all of them), and their weights, which may lie in ``room``."""
    if 0 < params.top_k < len(row):
        tokens = _largest(row, params.top_k)
        weights = _weights(row[tokens], top, params.temperature, np.empty(len(tokens), np.float32))
        total = float(weights.sum(dtype=np.float64))
    else:
        weights = _weights(row, top, params.temperature, room)
        if params.top_p == 1.0:
            return None, weights
        total = float(weights.sum())
        tokens = _likeliest(row, weights, params.top_p, total)
        weights = weights[tokens]
    if params.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        mass = np.cumsum(weights[order], dtype=np.float64)
        kept = np.sort(order[: int(np.searchsorted(mass, params.top_p * total)) + 1])
        tokens, weights = tokens[kept], weights[kept]
    return tokens, weights


def _weights(row: Floats, top: np.float32, temperature: float, room: Floats) -> Floats:
    """exp((row - top) / temperature), in ``room``."""
    if temperature >= _LEAST_TEMPERATURE:
        np.subtract(row, top, out=room)
        np.multiply(room, np.float32(1.0 / temperature), out=room)
    else:
        room[:] = (row.astype(np.float64) - float(top)) / temperature
    return np.exp(room, out=room)


def _largest(row: Floats, k: int) -> Ints:
    """The indices of the ``k`` largest values, ascending; of equal ones the lowest indices."""
    found = _reaching(row, k)
    if len(found) > k:
        # A stable sort makes the cut exact where values tie.
        found = np.sort(found[np.argsort(-row[found], kind="stable")[:k]])
    return found


def _likeliest(row: Floats, weights: Floats, top_p: float, total: float) -> Ints:
    """Indices, ascending, of all tokens down to some weight, which together have ``top_p`` of ``total`` (up to rounding)."""
    for k in _GROWING:
        if k >= len(row):
            break
        found = _reaching(row, k)
        if float(weights[found].sum(dtype=np.float64)) >= top_p * total:
            return found
    # All tokens of less than this together hold less than the rest.
    return np.flatnonzero(weights >= (1.0 - top_p) * total / len(weights))


def _reaching(row: Floats, k: int) -> Ints:
    """Indices, ascending, of the ``k`` largest values and of all that are not smaller than the bound which finds them.

    In each of many columns of values the largest is found. ``k`` of those reach the k-th largest of them, so the k-th
    largest of all does too, and it takes one pass over the row and no sorting of it.
    """
    n_columns = max(_LEAST_COLUMNS, 1 << (4 * k - 1).bit_length())
    n_rows, rest = divmod(len(row), n_columns)
    if n_rows < 4:
        return np.flatnonzero(row >= np.partition(row, len(row) - k)[len(row) - k])
    grid = row[: len(row) - rest].reshape(n_rows, n_columns)
    tops = grid.max(axis=0)
    bound = np.partition(tops, n_columns - k)[n_columns - k]
    columns = np.flatnonzero(tops >= bound)
    found = (np.arange(n_rows)[:, None] * n_columns + columns)[grid[:, columns] >= bound]
    return np.concatenate([found, np.flatnonzero(row[len(row) - rest :] >= bound) + (len(row) - rest)])


def _quantile(weights: Floats, u: float) -> int:
    """The first index at which the running sum of ``weights`` exceeds ``u`` of the whole."""
    whole = len(weights) // _PART * _PART
    parts = np.append(weights[:whole].reshape(-1, _PART).sum(axis=1), weights[whole:].sum())
    sums = np.cumsum(parts, dtype=np.float64)
    target = u * sums[-1]
    # Rounding may put the target at the very end, behind which all weights are 0.
    part = min(int(np.searchsorted(sums, target, side="right")), int(np.flatnonzero(parts)[-1]))
    inside = weights[part * _PART : (part + 1) * _PART]
    running = np.cumsum(inside, dtype=np.float64)
    running += sums[part - 1] if part else 0.0
    index = min(int(np.searchsorted(running, target, side="right")), int(np.flatnonzero(inside)[-1]))
    return part * _PART + index

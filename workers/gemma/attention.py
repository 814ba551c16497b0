"""Attention of a mixed batch over the sessions' blocks.

Where each step's keys lie and what it may see is the same in all layers of a kind, so it is worked out once for a
forward pass (:func:`plan`) and used by each layer (:func:`attend`). All decodes share one softmax; a prefill chunk has
its own, for 256 of its tokens at a time, which bounds the memory for scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shmsched.workers.gemma.kv_blocks import KvBlocks, Segment

Floats = npt.NDArray[np.float32]

_TILE_TOKENS = 256


class Span(NamedTuple):
    """The tokens of one session in this pass: ``length`` from ``row`` on, the first of them at ``position``."""

    slot: int
    row: int
    length: int
    position: int


@dataclass(slots=True)
class _Tile:
    """Rows of the batch that attend to the same keys; ``bias`` is -inf where a row must not see a key, 0 elsewhere."""

    rows: slice
    segments: list[Segment]
    bias: Floats


@dataclass(slots=True)
class AttentionPlan:
    decodes: list[tuple[int, list[Segment]]] = field(default_factory=list)
    tiles: list[_Tile] = field(default_factory=list)
    n_decode_keys: int = 0


def plan(spans: Sequence[Span], kv: KvBlocks, window: int | None) -> AttentionPlan:
    """What each row sees: every token up to itself, and with a ``window`` only the last so many of those."""
    made = AttentionPlan()
    for span in spans:
        for start in range(0, span.length, _TILE_TOKENS):
            n = min(_TILE_TOKENS, span.length - start)
            position = span.position + start
            stop = position + n
            first = 0 if window is None else max(0, position + 1 - window)
            segments = kv.segments(span.slot, first, stop)
            if span.length == 1:
                made.decodes.append((span.row, segments))
                made.n_decode_keys = max(made.n_decode_keys, stop - first)
            else:
                rows = slice(span.row + start, span.row + start + n)
                made.tiles.append(_Tile(rows, segments, _bias(position, n, first, stop, window)))
    return made


def attend(queries: Floats, kv: KvBlocks, layer: int, how: AttentionPlan) -> Floats:
    """Attention of ``queries``, (n, n_heads, head_dim) and already scaled, over the blocks of ``layer``: that shape."""
    keys, values = kv.keys(layer), kv.values(layer)
    n, n_heads, head_dim = queries.shape
    n_kv_heads = keys.shape[1]
    group = n_heads // n_kv_heads
    out = np.zeros((n, n_kv_heads, group, head_dim), np.float32)
    grouped = queries.reshape(out.shape)
    if how.decodes:
        # Rows are of different lengths; -inf beyond a row's end becomes a weight of 0.
        scores = np.full((len(how.decodes), n_kv_heads, group, how.n_decode_keys), -np.inf, np.float32)
        for i, (row, segments) in enumerate(how.decodes):
            _score(grouped[row], keys, segments, scores[i])
        _softmax(scores)
        for i, (row, segments) in enumerate(how.decodes):
            _mix(scores[i], values, segments, out[row])
    for tile in how.tiles:
        n_rows = tile.rows.stop - tile.rows.start
        n_keys = sum(segment.length for segment in tile.segments)
        # Heads that share keys go through one product.
        q = grouped[tile.rows].transpose(1, 0, 2, 3).reshape(n_kv_heads, n_rows * group, head_dim)
        scores = np.empty((n_kv_heads, n_rows * group, n_keys), np.float32)
        _score(q, keys, tile.segments, scores)
        scores.reshape(n_kv_heads, n_rows, group, n_keys)[:] += tile.bias[:, None]
        _softmax(scores)
        mixed = np.zeros((n_kv_heads, n_rows * group, head_dim), np.float32)
        _mix(scores, values, tile.segments, mixed)
        out[tile.rows] = mixed.reshape(n_kv_heads, n_rows, group, head_dim).transpose(1, 0, 2, 3)
    return out.reshape(n, n_heads, head_dim)


def _bias(position: int, n: int, first: int, stop: int, window: int | None) -> Floats:
    ages = np.arange(position, position + n)[:, None] - np.arange(first, stop)
    hidden = ages < 0
    if window is not None:
        hidden |= ages >= window
    return np.where(hidden, np.float32(-np.inf), np.float32(0))


def _score(queries: Floats, keys: Floats, segments: list[Segment], scores: Floats) -> None:
    column = 0
    for block, offset, length in segments:
        chunk = keys[block, :, offset : offset + length]
        np.matmul(queries, chunk.swapaxes(1, 2), out=scores[..., column : column + length])
        column += length


def _softmax(scores: Floats) -> None:
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)


def _mix(weights: Floats, values: Floats, segments: list[Segment], out: Floats) -> None:
    column = 0
    for block, offset, length in segments:
        out += weights[..., column : column + length] @ values[block, :, offset : offset + length]
        column += length

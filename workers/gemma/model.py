"""The forward pass of Gemma 3: one matrix product for each weight, whatever sessions the rows belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from shmsched.workers.gemma.attention import Span, attend, plan
from shmsched.workers.gemma.config import GemmaConfig
from shmsched.workers.gemma.kv_blocks import KvBlocks
from shmsched.workers.gemma.linear import narrow, widen

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.integer]

_GELU_SCALE = 2 * np.sqrt(2 / np.pi)


class GemmaModel:
    def __init__(self, config: GemmaConfig, weights: Mapping[str, Floats], embed: Callable[[Ints], Floats]) -> None:
        """``weights`` are those of ``weights.layout``; ``embed`` gives the embedding rows of tokens."""
        self.config = config
        self._embed = embed
        self._embedding_scale = np.float32(np.sqrt(config.dim))
        self._weights = weights
        # Queries and keys share one normalization and one rotation; the attention's scale is in the queries' weight.
        scale = np.float32(config.head_dim**-0.5)
        self._qk_norms = [
            np.concatenate(
                [
                    np.tile(weights[f"blk.{layer}.attn_q_norm"] * scale, (config.n_heads, 1)),
                    np.tile(weights[f"blk.{layer}.attn_k_norm"], (config.n_kv_heads, 1)),
                ]
            )
            for layer in range(config.n_layers)
        ]

    def forward(self, tokens: Ints, positions: Ints, spans: Sequence[Span], kv: KvBlocks, outputs: Ints) -> Floats:
        """Append the tokens' keys and values to ``kv``. Returns what :meth:`logits` takes for the rows ``outputs``."""
        c = self.config
        x = self._embed(tokens) * self._embedding_scale
        places = [kv.places(span.slot, span.position, span.length) for span in spans]
        blocks = np.concatenate([block for block, _ in places])
        offsets = np.concatenate([offset for _, offset in places])
        by_kind = {
            True: (plan(spans, kv, None), _rotation(positions, c.global_rope_base, c.head_dim)),
            False: (plan(spans, kv, c.sliding_window), _rotation(positions, c.local_rope_base, c.head_dim)),
        }
        n_qk = c.n_heads + c.n_kv_heads
        for layer in range(c.n_layers):
            how, (cos, sin) = by_kind[c.is_global(layer)]
            h = self._norm(x, f"blk.{layer}.attn_norm")
            qkv = narrow(h, self._weights[f"blk.{layer}.qkv"]).reshape(len(x), c.qkv_heads, c.head_dim)
            qk = _rotate(rms_norm(qkv[:, :n_qk], self._qk_norms[layer], c.norm_eps), cos, sin)
            kv.keys(layer)[blocks, :, offsets] = qk[:, c.n_heads :]
            kv.values(layer)[blocks, :, offsets] = qkv[:, n_qk:]
            h = attend(np.ascontiguousarray(qk[:, : c.n_heads]), kv, layer, how).reshape(len(x), -1)
            if layer == c.n_layers - 1:
                # Every key and value is stored; only rows that somebody waits for need the rest.
                x, h = x[outputs], h[outputs]
                if not len(x):
                    break
            h = narrow(h, self._weights[f"blk.{layer}.attn_output"])
            x = x + self._norm(h, f"blk.{layer}.post_attention_norm")
            h = widen(self._norm(x, f"blk.{layer}.ffn_norm"), self._weights[f"blk.{layer}.gate_up"])
            h = narrow(_gelu(h[:, : c.ffn_dim]) * h[:, c.ffn_dim :], self._weights[f"blk.{layer}.ffn_down"])
            x = x + self._norm(h, f"blk.{layer}.post_ffw_norm")
        return self._norm(x, "output_norm")

    def logits(self, hidden: Floats, out: Floats) -> Floats:
        """The logits of a few rows, in ``out``, which has room for ``linear.padded`` of them: (n, vocab)."""
        return widen(hidden, self._weights["output"], out)

    def _norm(self, x: Floats, name: str) -> Floats:
        return rms_norm(x, self._weights[name], self.config.norm_eps)


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    squares: Floats = np.einsum("...i,...i->...", x, x)
    scale: Floats = 1 / np.sqrt(squares / np.float32(x.shape[-1]) + np.float32(eps))
    return x * scale[..., None] * weight


def _gelu(x: Floats) -> Floats:
    """GELU, tanh form, as x * sigmoid(2u): numpy's exp is faster than its tanh."""
    u: Floats = x * x
    u *= np.float32(-0.044715 * _GELU_SCALE)
    u -= np.float32(_GELU_SCALE)
    u *= x
    # Beyond 80 the result is 0 to the last bit anyway, and exp would overflow.
    np.minimum(u, np.float32(80), out=u)
    np.exp(u, out=u)
    u += 1
    np.divide(x, u, out=u)
    return u


def _rotation(positions: Ints, base: float, head_dim: int) -> tuple[Floats, Floats]:
    """Cosines and sines of the rotary embedding, (n, 1, head_dim / 2); angles are large, so in double precision."""
    frequencies = base ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = positions[:, None, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = np.empty_like(x)
    np.multiply(first, cos, out=out[..., :half])
    out[..., :half] -= second * sin
    np.multiply(second, cos, out=out[..., half:])
    out[..., half:] += first * sin
    return out

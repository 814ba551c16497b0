"""A tiny Gemma 3 with random weights, written as a GGUF file, and its forward pass in plain numpy.

The reference is independent of the engine: one session, no cache, no batching, double precision, read by gguf's reader.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

Array = npt.NDArray[np.float64]

DIM, FFN, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 4, 2, 16
CONTEXT = 1024
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
USER = ["\n", "\n\n", "  ", "   ", "<b>"]
WORDS = ["▁", *"Helowrdsabc", "ll", "He", "llo", "Hello", "▁w", "or", "ld", "▁wor", "▁world", "é", "日"]
VOCAB = [*SPECIAL, *USER, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
TYPES = [CONTROL] * len(SPECIAL) + [USER_DEFINED] * len(USER) + [BYTE] * 256 + [NORMAL] * len(WORDS)


def write_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(VOCAB)
    writer.add_token_scores([-1000.0 if kind != NORMAL else -float(i) for i, kind in enumerate(TYPES)])
    writer.add_token_types(TYPES)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(False)


def write_model(
    path: Path,
    *,
    seed: int = 0,
    n_layers: int = 7,
    window: int = 24,
    pattern: int | None = None,
    architecture: str = "gemma3",
    quantized: bool = True,
) -> Path:
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny Gemma")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(DIM)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_sliding_window(window)
    if pattern is not None:
        writer.add_uint32(f"{architecture}.attention.sliding_window_pattern", pattern)
    write_vocabulary(writer)

    def matrix(name: str, rows: int, columns: int, kind: GGMLQuantizationType = GGMLQuantizationType.F32) -> None:
        values = rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)
        kind = kind if quantized else GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)

    def norm(name: str, size: int, mean: float = 1.0) -> None:
        writer.add_tensor(f"{name}.weight", rng.normal(mean, 0.3, size).astype(np.float32))

    matrix("token_embd", len(VOCAB), DIM, GGMLQuantizationType.Q8_0)
    norm("output_norm", DIM)
    for layer in range(n_layers):
        b = f"blk.{layer}"
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            norm(f"{b}.{name}", DIM)
        # Well over 1, so that attention picks out single tokens and a wrong key shows.
        norm(f"{b}.attn_q_norm", HEAD_DIM, 2.0)
        norm(f"{b}.attn_k_norm", HEAD_DIM, 2.0)
        matrix(f"{b}.attn_q", HEADS * HEAD_DIM, DIM, GGMLQuantizationType.Q5_0)
        matrix(f"{b}.attn_k", KV_HEADS * HEAD_DIM, DIM)
        matrix(f"{b}.attn_v", KV_HEADS * HEAD_DIM, DIM, GGMLQuantizationType.F16)
        matrix(f"{b}.attn_output", DIM, HEADS * HEAD_DIM)
        matrix(f"{b}.ffn_gate", FFN, DIM)
        matrix(f"{b}.ffn_up", FFN, DIM)
        matrix(f"{b}.ffn_down", DIM, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Reference:
    """The forward pass of a file made by :func:`write_model`."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.w = {
            t.name.removesuffix(".weight"): gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64)
            for t in reader.tensors
        }
        self.n_layers = reader.fields["gemma3.block_count"].contents()
        self.window = reader.fields["gemma3.attention.sliding_window"].contents()
        pattern = reader.fields.get("gemma3.attention.sliding_window_pattern")
        self.pattern = 6 if pattern is None else pattern.contents()

    def logits(self, tokens: list[int]) -> Array:
        """One row for each token."""
        w, n = self.w, len(tokens)
        x = w["token_embd"][tokens] * np.sqrt(DIM)
        age = np.arange(n)[:, None] - np.arange(n)
        for layer in range(self.n_layers):
            b = f"blk.{layer}"
            is_global = layer % self.pattern == self.pattern - 1
            base = 1e6 if is_global else 1e4
            seen = (age >= 0) if is_global else (age >= 0) & (age < self.window)
            h = self.norm(x, f"{b}.attn_norm")
            q = self.norm((h @ w[f"{b}.attn_q"].T).reshape(n, HEADS, HEAD_DIM), f"{b}.attn_q_norm")
            k = self.norm((h @ w[f"{b}.attn_k"].T).reshape(n, KV_HEADS, HEAD_DIM), f"{b}.attn_k_norm")
            v = (h @ w[f"{b}.attn_v"].T).reshape(n, KV_HEADS, HEAD_DIM)
            q, k = rope(q, base), rope(k, base)
            mixed = np.empty((n, HEADS, HEAD_DIM))
            for head in range(HEADS):
                shared = head * KV_HEADS // HEADS
                scores = np.where(seen, q[:, head] @ k[:, shared].T / np.sqrt(HEAD_DIM), -np.inf)
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                mixed[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, shared]
            h = mixed.reshape(n, -1) @ w[f"{b}.attn_output"].T
            x = x + self.norm(h, f"{b}.post_attention_norm")
            h = self.norm(x, f"{b}.ffn_norm")
            gate = h @ w[f"{b}.ffn_gate"].T
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
            h = (gate * (h @ w[f"{b}.ffn_up"].T)) @ w[f"{b}.ffn_down"].T
            x = x + self.norm(h, f"{b}.post_ffw_norm")
        return np.asarray(self.norm(x, "output_norm") @ w["token_embd"].T)

    def norm(self, x: Array, name: str) -> Array:
        return np.asarray(x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * self.w[name])


def rope(x: Array, base: float) -> Array:
    """Rotate the pairs (i, i + half) of x, (n, heads, head_dim), as complex numbers."""
    half = HEAD_DIM // 2
    turned = x[..., :half] + 1j * x[..., half:]
    turned = turned * np.exp(1j * np.outer(np.arange(len(x)), base ** (-np.arange(half) / half)))[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)

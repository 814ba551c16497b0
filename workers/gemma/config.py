"""The shape of a Gemma 3 model, from the header of its GGUF file."""

from __future__ import annotations

from dataclasses import dataclass

from shmsched.workers.gguf.file import GgufError, GgufFile


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig:
    n_layers: int
    dim: int
    ffn_dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    sliding_window: int
    """A sliding-window layer's token sees itself and the ``sliding_window - 1`` tokens before it."""
    layers_per_global: int
    """Every so many layers, the last of them is global and the others have the sliding window."""
    global_rope_base: float
    local_rope_base: float

    @property
    def qkv_heads(self) -> int:
        return self.n_heads + 2 * self.n_kv_heads

    def is_global(self, layer: int) -> bool:
        return (layer + 1) % self.layers_per_global == 0


def read_config(file: GgufFile) -> GemmaConfig:
    """Raises :class:`GgufError` for anything but a Gemma 3 text model that ``model`` computes exactly."""
    architecture = file.text("general.architecture")
    if architecture != "gemma3":
        raise GgufError(f"{file.path} holds a model of architecture {architecture!r}; this engine runs 'gemma3'")
    head_dim = file.integer("gemma3.attention.key_length")
    if file.integer("gemma3.attention.value_length", head_dim) != head_dim:
        raise GgufError(f"{file.path}: keys and values of different lengths are not supported")
    if file.number("gemma3.final_logit_softcapping", 0.0) or file.number("gemma3.rope.scaling.factor", 1.0) != 1.0:
        raise GgufError(
            f"{file.path}: soft-capped logits and scaled rotary positions (Gemma 3 4B and larger) are not supported"
        )
    config = GemmaConfig(
        n_layers=file.integer("gemma3.block_count"),
        dim=file.integer("gemma3.embedding_length"),
        ffn_dim=file.integer("gemma3.feed_forward_length"),
        n_heads=file.integer("gemma3.attention.head_count"),
        n_kv_heads=file.integer("gemma3.attention.head_count_kv"),
        head_dim=head_dim,
        vocab_size=file.tensor("token_embd.weight").shape[0],
        context_length=file.integer("gemma3.context_length"),
        norm_eps=file.number("gemma3.attention.layer_norm_rms_epsilon"),
        sliding_window=file.integer("gemma3.attention.sliding_window"),
        layers_per_global=file.integer("gemma3.attention.sliding_window_pattern", 6),
        global_rope_base=file.number("gemma3.rope.freq_base"),
        local_rope_base=file.number("gemma3.rope.freq_base_swa", 10_000.0),
    )
    if config.n_kv_heads < 1 or config.n_heads % config.n_kv_heads or head_dim % 2 or config.layers_per_global < 1:
        raise GgufError(f"{file.path}: its header describes no model: {config}")
    return config

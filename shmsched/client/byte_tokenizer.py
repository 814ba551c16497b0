"""Bytes as tokens: the tokenizer ``bytes``, for an engine that has no vocabulary of its own to speak of."""

from __future__ import annotations

from shmsched.arguments import text as checked
from shmsched.steps import Tokens


class ByteTokenizer:
    """A token is a byte of UTF-8. Tokens from 256 on stand for nothing, and decode to U+FFFD."""

    stop_tokens: tuple[int, ...] = ()

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        return list(checked("text", text).encode())

    def decode(self, tokens: Tokens) -> str:
        return bytes(t if t < 256 else 0xFF for t in map(int, tokens)).decode(errors="replace")

    def token_bytes(self) -> list[bytes]:
        """What each token stands for. Those from 256 on are not among them."""
        return [bytes([token]) for token in range(256)]


def load(argument: str) -> ByteTokenizer:
    return ByteTokenizer()

"""The tokenizer of any GGUF file, whatever its kind: llama.cpp's own, without the weights."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from shmsched.arguments import text as checked
from shmsched.workers.llama_cpp.library import Model, llama

_SILENT = llama.LLAMA_TOKEN_ATTR_UNKNOWN | llama.LLAMA_TOKEN_ATTR_UNUSED | llama.LLAMA_TOKEN_ATTR_CONTROL


class Tokenizer:
    """Text to tokens and back.

    ``stop_tokens`` are the tokens that end a text or a turn. Pieces are joined as they are: llama.cpp's own
    ``llama_detokenize`` takes out spaces before punctuation, which changes text that is already shown.
    """

    def __init__(self, path: str) -> None:
        self._model = Model(path, vocab_only=True)
        self._pieces: dict[int, bytes] = {}
        self.stop_tokens = self._model.stop_tokens
        self.vocab_size = self._model.vocab_size
        # Some vocabularies begin every text with a space that is not in it.
        begins = self.encode("a")
        self._adds_space = bool(begins) and self._piece(begins[0]).startswith(b" ")

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """The tokens of ``text``; with ``bos`` the token for its beginning first, if the model wants one. The names of
        control tokens in ``text`` are text like any other."""
        data = checked("text", text).encode()
        room = len(data) + 8
        while True:
            tokens = (llama.llama_token * room)()
            n = llama.llama_tokenize(self._model.vocab, data, len(data), tokens, room, False, False)
            if n >= 0:
                first = [] if not bos or self._model.bos is None else [self._model.bos]
                return [*first, *tokens[:n]]
            room = -n

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ``tokens``, without control tokens. Bytes that are not UTF-8 become U+FFFD."""
        data = b"".join(map(self._piece, map(int, tokens)))
        if self._adds_space and data.startswith(b" "):
            data = data[1:]
        return data.decode(errors="replace")

    def _piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
            silent = llama.llama_vocab_get_attr(self._model.vocab, token) & _SILENT
            piece = self._pieces[token] = b"" if silent else self._read(token)
        return piece

    def _read(self, token: int) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            n = llama.llama_token_to_piece(self._model.vocab, token, buffer, room, 0, False)
            if n >= 0:
                return buffer.raw[:n]
            room = -n


def load(path: str) -> Tokenizer:
    """The tokenizer of the GGUF file at ``path``."""
    return Tokenizer(path)

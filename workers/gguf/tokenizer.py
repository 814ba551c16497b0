"""The tokenizer of a GGUF file, built from the vocabulary in its header by SentencePiece, the library that made it."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum

import numpy as np
import sentencepiece

from shmsched.arguments import text as checked
from shmsched.workers.gguf.file import GgufError, GgufFile

_SPACE = "\u2581".encode()  # SentencePiece's mark for a space


class PieceType(IntEnum):
    """``tokenizer.ggml.token_type``; the same numbers as SentencePiece's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Tokenizer:
    """Text to tokens and back.

    ``stop_tokens`` are the tokens that end a text or a turn. The mark U+2581, which the vocabulary has for a space,
    comes back as a space; any other text comes back as it was.
    """

    def __init__(self, file: GgufFile) -> None:
        self.bos = file.integer("tokenizer.ggml.bos_token_id")
        self.stop_tokens = stop_tokens(file)
        pieces = file.strings("tokenizer.ggml.tokens")
        types = file.array("tokenizer.ggml.token_type").tolist()
        self.vocab_size = len(pieces)
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=_model_proto(file, pieces, types))
        self._pieces = pieces
        self._types = types
        silent = (PieceType.CONTROL, PieceType.UNKNOWN, PieceType.UNUSED)
        self._silent = frozenset(token for token, kind in enumerate(types) if kind in silent)

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """The tokens of ``text``. The names of control pieces in it are text like any other."""
        tokens: list[int] = self._processor.encode(checked("text", text))
        return [self.bos, *tokens] if bos else tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ``tokens``, without their control pieces. Bytes that are not UTF-8 become U+FFFD."""
        kept = []
        for token in tokens:
            token = int(token)
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
            if token not in self._silent:
                kept.append(token)
        text: str = self._processor.decode(kept)
        return text

    def token_bytes(self) -> list[bytes]:
        """What each token stands for; empty for those that come back as no text. What grammars are matched against."""
        return [self._bytes(token) for token in range(self.vocab_size)]

    def _bytes(self, token: int) -> bytes:
        piece = self._pieces[token]
        if token in self._silent:
            return b""
        if self._types[token] == PieceType.BYTE:
            return bytes([int(piece[3:5], 16)])  # <0x0A>
        return piece.replace(_SPACE, b" ")


def load(path: str) -> Tokenizer:
    """The tokenizer of the GGUF file at ``path``."""
    return Tokenizer(GgufFile(path))


def stop_tokens(file: GgufFile) -> tuple[int, ...]:
    """End of text, and end of turn if the vocabulary has one."""
    found = {file.integer("tokenizer.ggml.eos_token_id")}
    if "tokenizer.ggml.eot_token_id" in file.metadata:
        found.add(file.integer("tokenizer.ggml.eot_token_id"))
    pieces = file.strings("tokenizer.ggml.tokens")
    if b"<end_of_turn>" in pieces:
        found.add(pieces.index(b"<end_of_turn>"))
    return tuple(sorted(found))


def _model_proto(file: GgufFile, pieces: list[bytes], types: list[int]) -> bytes:
    """The vocabulary as a SentencePiece ``ModelProto`` (sentencepiece_model.proto), written without protobuf."""
    kind = file.text("tokenizer.ggml.model")
    if kind != "llama":
        raise GgufError(f"{file.path}: its tokenizer is {kind!r}; only SentencePiece BPE ('llama') is known")
    scores = file.array("tokenizer.ggml.scores")
    if not len(pieces) == len(types) == len(scores):
        raise GgufError(
            f"{file.path}: {len(pieces)} pieces, {len(types)} types and {len(scores)} scores; one of each is wanted"
        )
    unknown = file.integer("tokenizer.ggml.unknown_token_id")
    floats = np.asarray(scores, "<f4").tobytes()
    parts = []
    for token, (piece, piece_type) in enumerate(zip(pieces, types, strict=True)):
        if token == unknown:
            piece_type = PieceType.UNKNOWN
        elif piece_type == PieceType.USER_DEFINED:
            # GGUF spells these with plain spaces; SentencePiece looks for them after it has marked the spaces.
            piece = piece.replace(b" ", _SPACE)
        body = b"\n%b%b\x15%b" % (_varint(len(piece)), piece, floats[4 * token : 4 * token + 4])
        if piece_type != PieceType.NORMAL:
            body += b"\x18%c" % piece_type
        parts.append(b"\n%b%b" % (_varint(len(body)), body))
    bpe, byte_fallback = 2, PieceType.BYTE in types
    trainer = _integers({3: bpe, 35: byte_fallback, 40: unknown, 41: file.integer("tokenizer.ggml.bos_token_id")})
    prefix = bool(file.integer("tokenizer.ggml.add_space_prefix", 1))
    normalizer = b"\n\x08identity" + _integers({3: prefix, 4: False, 5: True})
    parts += [b"\x12%b%b" % (_varint(len(trainer)), trainer), b"\x1a%b%b" % (_varint(len(normalizer)), normalizer)]
    return b"".join(parts)


def _integers(fields: dict[int, int]) -> bytes:
    return b"".join(_varint(number << 3) + _varint(value) for number, value in fields.items())


def _varint(value: int) -> bytes:
    if value < 0x80:
        return struct.pack("B", value)
    return struct.pack("B", value & 0x7F | 0x80) + _varint(value >> 7)

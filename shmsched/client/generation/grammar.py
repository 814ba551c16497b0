"""Constraints as grammars: a logits processor that leaves only what the grammar allows. Needs llguidance, the extra ``grammar``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from shmsched.arguments import STRANGE, shown, text
from shmsched.client.models import Model
from shmsched.errors import InvalidRequest, Unsupported
from shmsched.saying import counted

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


@runtime_checkable
class TokenBytes(Protocol):
    """What a grammar needs of a tokenizer."""

    def encode(self, text: str, *, bos: bool = False) -> list[int]: ...
    def token_bytes(self) -> Sequence[bytes]:
        """What each token stands for, in the order of the vocabulary; empty for one that stands for no text. Those that are
        missing at the end stand for none."""
        ...


class Grammar:
    """Keeps one generation to a grammar: ``session.generate(..., logits_processor=Grammar.json_schema(model, schema))``.

    When the text is complete, only the model's stop tokens are left. Raises InvalidRequest for a grammar that is none, and
    Unsupported where llguidance is not installed or the model's tokenizer does not say what its tokens stand for.
    """

    def __init__(self, model: Model, grammar: str) -> None:
        """grammar: in llguidance's own notation, as the constructors below make it."""
        self._matcher = _matcher(model, grammar)
        self._mask = np.zeros((model.vocab_size + 31) // 32, np.int32)
        self._consumed: list[int] = []

    @classmethod
    def json_schema(cls, model: Model, schema: dict[str, Any]) -> Grammar:
        """JSON that matches a JSON schema, without white space between its parts: small models tend to add it for ever."""
        try:
            written = json.dumps(schema)
        except STRANGE as e:
            raise InvalidRequest(f"schema is {shown(schema)}; a JSON schema, as a dict, is wanted ({e})") from None
        overrides = {"whitespace_flexible": False}
        return cls(model, _llguidance().LLMatcher.grammar_from_json_schema(written, overrides=overrides))

    @classmethod
    def regex(cls, model: Model, regex: str) -> Grammar:
        """Text that matches a regular expression as a whole."""
        return cls(model, _llguidance().LLMatcher.grammar_from_regex(text("regex", regex)))

    @classmethod
    def lark(cls, model: Model, grammar: str) -> Grammar:
        """Text of a context-free grammar in Lark's notation, as llguidance reads it."""
        return cls(model, _llguidance().LLMatcher.grammar_from_lark(text("grammar", grammar)))

    def __call__(self, tokens: Sequence[int], row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The row with -inf for what the grammar does not allow after ``tokens``: its one copy."""
        self._follow(tokens)
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        allowed = np.unpackbits(self._mask.view(np.uint8), count=len(row), bitorder="little").view(bool)
        return np.where(allowed, row, np.float32(-np.inf))

    def _follow(self, tokens: Sequence[int]) -> None:
        known = len(self._consumed)
        if list(tokens[:known]) != self._consumed:
            # Another generation, or the same one begun again.
            self._matcher.reset()
            self._consumed, known = [], 0
        for token in tokens[known:]:
            self._matcher.consume_token(token)
            self._check()
            self._consumed.append(token)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(
                f"the grammar went wrong after {counted(len(self._consumed), 'token')}: {self._matcher.get_error()}"
            )


def _matcher(model: Model, grammar: str) -> LLMatcher:
    matcher: LLMatcher = _llguidance().LLMatcher(_tokenizer(model), grammar)
    if matcher.is_error():
        raise InvalidRequest(f"the grammar cannot be used: {matcher.get_error()}")
    return matcher


def _tokenizer(model: Model) -> LLTokenizer:
    tokenizer = model.tokenizer
    if not isinstance(tokenizer, TokenBytes):
        raise Unsupported(
            f"the tokenizer of model {model.name!r} does not say what its tokens stand for; give it a method token_bytes()"
        )
    if not model.stop_tokens:
        raise Unsupported(f"model {model.name!r} has no stop token, so nothing could end a text that is complete")
    return _built(tokenizer, model.vocab_size, model.stop_tokens)


@cache
def _built(tokenizer: TokenBytes, vocab_size: int, stop_tokens: tuple[int, ...]) -> LLTokenizer:
    """Once for each tokenizer: for 262,144 tokens it takes a second or two."""
    llguidance = _llguidance()
    built: LLTokenizer = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, stop_tokens)),
        n_vocab=vocab_size,
        eos_token=list(stop_tokens),
        slices=llguidance.LLTokenizer.json_slices(),
    )
    return built


class _Vocabulary:
    """A tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: TokenBytes, vocab_size: int, stop_tokens: tuple[int, ...]) -> None:
        known = list(tokenizer.token_bytes())[:vocab_size]
        # A model's rows may be wider than its tokenizer's vocabulary.
        pieces = [*known, *[b""] * (vocab_size - len(known))]
        self.eos_token_id = stop_tokens[0]
        self.bos_token_id = None
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]
        self.tokens = [piece or b"<%d>" % token for token, piece in enumerate(pieces)]
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as e:
        raise Unsupported(f"grammars need llguidance: pip install 'shmsched[grammar]' ({e})") from e
    return llguidance

"""The models that a daemon serves, as a client sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Protocol

from shmsched.arguments import shown
from shmsched.engine.contract import TOKENIZERS, EngineInfo
from shmsched.errors import InvalidRequest, Unsupported
from shmsched.steps import Tokens
from shmsched.wire import frames
from shmsched.wire.frames import Rewinds


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def stop_tokens(self) -> tuple[int, ...]: ...
    def encode(self, text: str, *, bos: bool = False) -> list[int]: ...
    def decode(self, tokens: Tokens) -> str: ...


@dataclass(frozen=True, slots=True)
class Model:
    """A model and the limits in force for its sessions.

    In ``client.models``: what any session of it can rely on, the smallest of its engines' limits and what all of them can do. As
    ``session.model``: what the engine of that session can take and do, which may be more.
    """

    info: EngineInfo
    engines: int
    """How many engines serve it now."""
    supports_rewind: bool
    """To the beginning at least; to anywhere, if ``info.rewinds_anywhere`` too."""
    supports_fork: bool = False

    @property
    def name(self) -> str:
        return self.info.model

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return self.info.stop_tokens

    @property
    def max_sessions(self) -> int:
        """Of all its engines together."""
        return self.info.max_sessions

    @property
    def max_session_tokens(self) -> int:
        return self.info.max_session_tokens

    @property
    def max_prefill_chunk_size(self) -> int:
        assert self.info.max_prefill_chunk_size is not None
        return self.info.max_prefill_chunk_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded in this process. Raises Unsupported if the engine names none that is installed."""
        if self.info.tokenizer is None:
            raise Unsupported(
                f"model {self.info.model!r} has no tokenizer, since its engine names none (EngineInfo.tokenizer). Give it tokens:"
                " session.generate, or submit, instead of text"
            )
        return _load_tokenizer(self.info.tokenizer)

    def tokens_of(self, prompt: str, *, bos: bool = True) -> list[int]:
        """``prompt`` as the tokenizer has it, with the token for the beginning of a text in front, if it has one. Raises Unsupported
        without a tokenizer, and InvalidRequest where nothing comes of it."""
        tokens = self.tokenizer.encode(prompt, bos=bos)
        if not isinstance(tokens, Sequence):
            raise InvalidRequest(
                f"the tokenizer of model {self.name!r} returned {shown(tokens)} for a text; a list of tokens is wanted"
            )
        if not tokens:
            raise InvalidRequest(
                f"the prompt {shown(prompt)} has no tokens for model {self.name!r} to go on from; give it some text"
            )
        return list(tokens)

    @property
    def rewinds(self) -> Rewinds:
        """Where a session can be taken back to."""
        if not self.supports_rewind:
            return Rewinds.NOWHERE
        return Rewinds.ANYWHERE if self.info.rewinds_anywhere else Rewinds.TO_THE_BEGINNING

    @classmethod
    def of(cls, message: frames.Model) -> Model:
        rewinds = Rewinds.of(message.rewinds)
        info = EngineInfo(
            model=message.model,
            vocab_size=message.vocab_size,
            max_sessions=message.max_sessions,
            max_session_tokens=message.max_session_tokens,
            max_batch_size=2 * message.max_prefill_chunk_size + message.max_decode_sequences,
            max_decode_sequences=message.max_decode_sequences,
            max_prefill_chunk_size=message.max_prefill_chunk_size,
            tokenizer=message.tokenizer or None,
            rewinds_anywhere=rewinds is not Rewinds.TO_THE_BEGINNING,
            stop_tokens=message.stop_tokens,
        )
        return cls(info, message.engines, rewinds is not Rewinds.NOWHERE, bool(message.supports_fork))

    def within(self, limits: frames.SessionLimits) -> Model:
        """The same with what the engine of one session can take and do."""
        chunk, rewinds = limits.max_prefill_chunk_size, Rewinds.of(limits.rewinds)
        info = replace(
            self.info,
            max_session_tokens=limits.max_session_tokens,
            max_batch_size=2 * chunk + (self.info.max_decode_sequences or 1),
            max_prefill_chunk_size=chunk,
            rewinds_anywhere=rewinds is not Rewinds.TO_THE_BEGINNING,
        )
        fork = bool(limits.supports_fork)
        if info == self.info and (rewinds, fork) == (self.rewinds, self.supports_fork):
            # As it nearly always is: the sessions of a model share it.
            return self
        return Model(info, self.engines, rewinds is not Rewinds.NOWHERE, fork)


@cache
def _load_tokenizer(spec: str) -> Tokenizer:
    """``kind:argument``. Only what is installed here under the name is run: a peer chooses a name, never code."""
    kind, _, argument = spec.partition(":")
    for entry in entry_points(group=TOKENIZERS, name=kind):
        try:
            tokenizer: Tokenizer = entry.load()(argument)
        except ImportError as e:
            raise Unsupported(f"the tokenizer {kind!r} needs a package that is not installed: {e}") from e
        return tokenizer
    known = ", ".join(sorted({entry.name for entry in entry_points(group=TOKENIZERS)})) or "none"
    raise Unsupported(f"no tokenizer of kind {kind!r} is installed (entry points {TOKENIZERS}: {known}); pass tokens")

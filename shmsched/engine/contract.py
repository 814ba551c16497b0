"""What an engine is: the class to subclass, and what it says of itself.

Every call comes from the host's main thread, one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from shmsched.arguments import flag, shown, text, whole, whole_or_none
from shmsched.errors import EngineSpecError, InvalidRequest, Unsupported
from shmsched.scheduling.params import SchedulerParams

if TYPE_CHECKING:
    from shmsched.engine.batch_view import BatchView

TOKENIZERS = "shmsched.tokenizers"
"""The entry points of what loads a tokenizer."""
Limits = SchedulerParams
"""The limits in force for an engine: ``max_decode_sequences``, ``max_prefill_chunk_size`` and the derived ``max_batch_size``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine serves and can take. Known before ``start``: reading a header is fine, loading weights is not.

    ``max_session_tokens`` is the longest session, in tokens. The three limits are the engine's own, if smaller than the
    daemon's. ``rewinds_anywhere``: whether ``rewind``, where the engine has it, can go to any length; False where it can go to the
    beginning only. ``tokenizer`` is ``kind:argument``, where kind is an entry point of ``shmsched.tokenizers``.
    """

    model: str
    vocab_size: int
    max_sessions: int
    max_session_tokens: int
    max_batch_size: int | None = None
    max_decode_sequences: int | None = None
    max_prefill_chunk_size: int | None = None
    tokenizer: str | None = None
    rewinds_anywhere: bool = True
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_sessions", "max_session_tokens"):
            whole(f"EngineInfo.{name}", getattr(self, name), 1, 2**31 - 1)
        for name, least in (("max_batch_size", 3), ("max_decode_sequences", 1), ("max_prefill_chunk_size", 1)):
            whole_or_none(f"EngineInfo.{name}", getattr(self, name), least, 2**31 - 1)
        if not isinstance(self.stop_tokens, tuple):
            raise InvalidRequest(f"EngineInfo.stop_tokens is {shown(self.stop_tokens)}; a tuple of tokens is wanted")
        for token in self.stop_tokens:
            whole("EngineInfo.stop_tokens has a token that", token, 0, self.vocab_size - 1, where="(the vocabulary)")
        if (
            not isinstance(self.model, str)
            or not 0 < len(self.model.encode(errors="replace")) <= 255
            or not is_text(self.model)
        ):
            raise InvalidRequest(
                f"EngineInfo.model is {shown(self.model)}; it must be a name of 1 to 255 bytes of UTF-8"
            )
        if self.tokenizer is not None:
            text("EngineInfo.tokenizer", self.tokenizer, most_bytes=65535)
        flag("EngineInfo.rewinds_anywhere", self.rewinds_anywhere)


def is_text(name: str) -> bool:
    """It can be written as UTF-8: a name that came in another encoding cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class Engine:
    """A model runner. Subclass it, set ``info`` in ``__init__``, and implement ``forward``.

    Slots are dense in ``[0, info.max_sessions)``; each open session has one, and a closed one's is used again.
    """

    info: EngineInfo

    def start(self, limits: Limits) -> None:
        """Load weights, allocate for at most ``limits``, warm up. Has a time-out of its own."""

    def open_session(self, slot: int, options: bytes) -> None:
        """Begin an empty session in ``slot``. ``options`` is what the client passed, opaque to everyone else."""

    def rewind(self, slot: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of the session in ``slot``."""
        raise Unsupported(f"{type(self).__name__} cannot rewind a session")

    def fork_session(self, parent: int, slot: int, length: int) -> None:
        """Begin a session in ``slot`` with the first ``length`` tokens of the one in ``parent``, independent of it from then on."""
        raise Unsupported(f"{type(self).__name__} cannot fork a session")

    def close_session(self, slot: int) -> None:
        """The session in ``slot`` is over; its state may go."""

    def forward(self, batch: BatchView) -> None:
        """Run one batch: append each step's tokens to its session, and give a result for each of ``batch.outputs``."""
        raise NotImplementedError

    def close(self) -> None:
        """The engine is going away."""


def check_complete(engine: Engine) -> None:
    """Raises EngineSpecError if the engine lacks what no engine can do without."""
    name = type(engine).__name__
    if not isinstance(getattr(engine, "info", None), EngineInfo):
        raise EngineSpecError(f"engine {name} has no self.info; its __init__ sets it to an EngineInfo")
    if type(engine).forward is Engine.forward:
        raise EngineSpecError(f"engine {name} has no forward(batch); without it, it can run nothing")
    if engine.info.tokenizer is not None:
        kind = engine.info.tokenizer.partition(":")[0]
        installed = sorted({entry.name for entry in entry_points(group=TOKENIZERS)})
        if kind not in installed:
            raise EngineSpecError(
                f"engine {name} names the tokenizer {engine.info.tokenizer!r}, and no tokenizer of kind {kind!r} is installed"
                f" (entry points {TOKENIZERS}: {', '.join(installed) or 'none'})"
            )

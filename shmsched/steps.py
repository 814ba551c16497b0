"""The vocabulary: one step as a client asks for it, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, NoReturn, TypeVar, dataclass_transform

import numpy as np
import numpy.typing as npt

from shmsched.errors import InvalidRequest
from shmsched.params import RequestParams

C = TypeVar("C")
Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def _read_only(cls: type[C]) -> type[C]:
    """A dataclass that is frozen for type checkers. Frozen for Python too, each would take 0.6 us to make and not 0.15."""
    made = dataclass(slots=True, eq=False)(cls)
    names = [f.name for f in fields(made)]  # type: ignore[arg-type]
    # With slots alone, the oldest protocols of pickle refuse it.
    made.__reduce__ = lambda self: (made, tuple([getattr(self, name) for name in names]))  # type: ignore[method-assign]
    return made


@_read_only
class Request:
    """One step: a decode (one token) or a prefill chunk (two or more) of one session; not to be written to."""

    request_id: int
    session_id: int
    tokens: Tokens
    params: RequestParams = RequestParams()


class LogitsBlock:
    """Raw logits of one step: ``data`` is float32, shape (rows, vocab), read-only.

    From a client, ``data`` lies in shared memory and is not a copy. The rows stay this client's while anything refers to
    them: the block, ``data``, or any slice of it. ``release()`` gives them back early; ``copy()`` detaches.

    After ``fork`` a child reads the same rows, but holds nothing: they change under it once the parent lets go of them. It is to
    ``copy()`` before the fork what it needs after it.

    In process, ``LogitsBlock(array)`` wraps an array of one's own.
    """

    __slots__ = ("_data", "_release")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a LogitsBlock cannot be pickled or copied: its rows lie in shared memory of this process; pass its .copy() on, an array"
        )

    def __init__(self, data: npt.NDArray[np.float32], release: Callable[[], None] | None = None) -> None:
        if not isinstance(data, np.ndarray) or data.dtype != np.float32 or data.ndim != 2:
            shape = getattr(data, "shape", type(data).__name__)
            raise InvalidRequest(
                f"logits of {getattr(data, 'dtype', 'no dtype')} {shape}; a float32 array of (rows, vocab) is wanted"
            )
        view = data.view()
        view.flags.writeable = False
        self._data: npt.NDArray[np.float32] | None = view
        self._release = release

    @classmethod
    def over(cls, rows: npt.NDArray[np.float32], release: Callable[[], None]) -> LogitsBlock:
        """The same over an array of the right kind that cannot be written to already: 0.5 us instead of 2."""
        block = cls.__new__(cls)
        block._data, block._release = rows, release
        return block

    @property
    def data(self) -> npt.NDArray[np.float32]:
        """float32 (rows, vocab), read-only. Raises ValueError once the block is released."""
        if self._data is None:
            raise ValueError("these logits were released; read .data before release(), or keep .copy()")
        return self._data

    def copy(self) -> npt.NDArray[np.float32]:
        """The logits in an array of their own, which outlives the block: float32 (rows, vocab)."""
        return self.data.copy()

    def release(self) -> None:
        """Give the rows back now. Slices taken before must not be read any more. Idempotent."""
        self._data = None
        release, self._release = self._release, None
        if release is not None:
            release()

    def __repr__(self) -> str:
        return f"LogitsBlock({'released' if self._data is None else self._data.shape})"


_NO_TOKENS = np.empty(0, np.int64)
_NO_TOKENS.flags.writeable = False


def _no_tokens() -> npt.NDArray[np.int64]:
    return _NO_TOKENS


@_read_only
class Response:
    """What one step gave; not to be written to.

    A sampled step has ``tokens`` (int64, one for each output row, in row order) and their ``logprobs`` (float32, natural
    logarithm, NaN where the engine does not say). A raw step has ``logits``. ``queue_wait``: for how many seconds the step (of a
    prompt in chunks, the first of them) was queued before an engine got it; None in process.
    """

    request_id: int
    session_id: int
    tokens: npt.NDArray[np.int64] = field(default_factory=_no_tokens)
    logprobs: npt.NDArray[np.float32] | None = None
    logits: LogitsBlock | None = None
    queue_wait: float | None = None


class SampledToken(NamedTuple):
    """One token of a generation."""

    token: int
    logprob: float
    """Natural logarithm; NaN where the engine does not say."""
    arrived: float
    """When it came, in seconds of ``time.monotonic()``."""

"""Taking tokens from a caller: any sequence of integers, any integer dtype, and nothing else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shmsched.errors import InvalidRequest
from shmsched.steps import Tokens


def as_tokens(tokens: Tokens, vocab_size: int) -> npt.NDArray[np.int32]:
    """The tokens as int32, shape (n,). Raises InvalidRequest that names the value that cannot be a token."""
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError) as e:
        raise InvalidRequest(f"tokens are no flat sequence of integers: {e}") from e
    if array.ndim != 1:
        raise InvalidRequest(f"tokens have shape {array.shape}; one dimension is wanted")
    if array.size == 0:
        raise InvalidRequest("tokens are empty; a step has at least one token")
    if array.dtype.kind not in "iu":
        # Integers beyond 64 bits make an object array: the first that is out of range is what to name.
        wrong = next((t for t in array.tolist() if isinstance(t, bool) or not isinstance(t, int)), array[0])
        if array.dtype.kind == "O" and isinstance(wrong, int) and not isinstance(wrong, bool):
            raise _outside(max(array.tolist(), key=abs), vocab_size)
        raise InvalidRequest(f"token {wrong!r} is not an integer (tokens of type {array.dtype})")
    least, most = int(array.min()), int(array.max())
    if least < 0 or most >= vocab_size:
        raise _outside(least if least < 0 else most, vocab_size)
    return array.astype(np.int32, copy=False)


def _outside(token: int, vocab_size: int) -> InvalidRequest:
    return InvalidRequest(f"token {token} is outside the vocabulary; it must be from 0 to {vocab_size - 1}")

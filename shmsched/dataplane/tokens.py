"""Taking tokens from a caller: any sequence of integers, any integer dtype, and nothing else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shmsched.arguments import STRANGE, shown
from shmsched.errors import InvalidRequest
from shmsched.steps import Tokens


def packed_tokens(tokens: Tokens, vocab_size: int) -> bytes:
    """The tokens as they travel: int32, little-endian. Raises as ``as_tokens``."""
    return as_tokens(tokens, vocab_size).astype("<i4", copy=False).tobytes()


def as_tokens(tokens: Tokens, vocab_size: int, argument: str = "") -> npt.NDArray[np.int32]:
    """The tokens as int32, shape (n,). Raises InvalidRequest that names the value that cannot be a token, and the ``argument``
    where it is not the tokens themselves."""
    of = f"{argument}: " if argument else ""
    try:
        array = np.asarray(tokens)
    except STRANGE as e:
        # Whatever a sequence of somebody else's raises.
        raise InvalidRequest(f"{of}tokens are no flat sequence of integers: {e}") from e
    if array.ndim == 0:
        raise InvalidRequest(
            f"{of}tokens are {shown(tokens)}, of type {type(tokens).__name__}; a sequence of integers is wanted"
        )
    if array.ndim != 1:
        raise InvalidRequest(f"{of}tokens have shape {array.shape}; one dimension is wanted")
    if array.size == 0:
        raise InvalidRequest(f"{of}tokens are empty; a step has at least one token")
    if array.dtype.kind not in "iu":
        # One float or text among them turns all into such: what the caller wrote is what to name. Integers beyond 64 bits
        # make objects or floats of all.
        values = array.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
        for value in values:
            if not isinstance(value, int | np.integer) or isinstance(value, bool):
                raise InvalidRequest(f"{of}token {shown(value)} is not an integer (tokens of type {array.dtype})")
        array = np.array(values, object)
    least, most = int(array.min()), int(array.max())
    if least < 0 or most >= vocab_size:
        raise InvalidRequest(
            f"{of}token {shown(least if least < 0 else most)} is outside the vocabulary; it must be from 0 to {vocab_size - 1}"
        )
    return array.astype(np.int32, copy=False)

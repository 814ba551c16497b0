"""A stream of tokens, between the thread that receives and the one that takes."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from shmsched.client.replies import SampledToken, TokenStream
from shmsched.steps import Response


class Stream(TokenStream):
    def wake(self) -> None:
        pass


class Looked(deque[SampledToken]):
    """Right after somebody has looked whether anything is here, something comes."""

    def __init__(self, stream: Stream, comes: Response) -> None:
        super().__init__()
        self._stream = stream
        self._comes: Response | None = comes

    def __len__(self) -> int:
        found, comes = super().__len__(), self._comes
        self._comes = None
        if comes is not None:
            self._stream.settle(comes)
        return found


def test_a_last_token_that_comes_while_one_looks_for_it_is_not_lost() -> None:
    stream = Stream()
    stream.tokens = Looked(stream, Response(1, 1, np.array([7]), np.zeros(1, np.float32)))
    assert stream.take() is None
    taken = stream.take()
    assert taken is not None
    assert taken.token == 7
    with pytest.raises(EOFError):
        stream.take()

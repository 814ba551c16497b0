"""A stream of tokens, between the thread that receives and the one that takes."""

from __future__ import annotations

import numpy as np
import pytest

from shmsched.client.replies import TokenStream
from shmsched.steps import Response, SampledToken


class Stream(TokenStream):
    def wake(self) -> None:
        pass


class Looked(Stream):
    """Right after somebody has looked whether it has ended, its last token comes."""

    comes: Response | None = None

    @property
    def came(self) -> int:
        comes, self.comes = self.comes, None
        if comes is not None:
            found = self._came
            self.settle(comes)
            return found
        return self._came

    @came.setter
    def came(self, n: int) -> None:
        self._came = n


def test_a_last_token_that_comes_while_one_looks_for_it_is_not_lost() -> None:
    stream = Looked()
    stream.comes = Response(1, 1, np.array([7]), np.zeros(1, np.float32))
    assert stream.take() is None
    taken = stream.take()
    assert taken is not None
    assert taken.token == 7
    with pytest.raises(EOFError):
        stream.take()


def test_what_comes_twice_counts_once() -> None:
    """An interrupt may come when a stream has been given something and the client has not noted that it was."""
    stream = Stream()
    first, second = SampledToken(1, 0.0, 0.0), SampledToken(2, 0.0, 0.0)
    for _ in range(2):
        stream.put(0, [first, second])
    assert stream.take() == first
    stream.put(0, [first, second])
    for _ in range(2):
        stream.settle(Response(1, 1, np.array([7]), np.zeros(1, np.float32)))
    rest = [stream.take(), stream.take()]
    assert [token.token for token in rest if token is not None] == [2, 7]
    with pytest.raises(EOFError):
        stream.take()

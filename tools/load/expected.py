"""What a session that generates must hold."""

from __future__ import annotations

from array import array

import numpy as np

from shmsched.client.session_core import SessionCore
from shmsched.tools.load.answers import Mirror
from shmsched.tools.load.turns import I32


class Expected:
    """The session's tokens, their hashes, and the token that was sampled last and not fed yet."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._tokens = array("i")
        self.unfed: int | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    def feed(self, tokens: I32) -> None:
        if len(tokens):
            self._mirror.commit(len(self), self._mirror.foresee(len(self), tokens))
            self._tokens.frombytes(tokens.tobytes())

    def rewind(self, length: int) -> None:
        self._mirror.rewind(length)
        del self._tokens[length:]
        self.unfed = None

    def upto(self, length: int) -> Expected:
        """What a session forked at ``length`` must hold."""
        child = Expected(self._mirror.upto(length))
        child._tokens = self._tokens[:length]
        return child

    def foresee(self, tokens: I32, n: int, position: int | None = None) -> list[int]:
        """The ``n`` tokens that greedily follow ``tokens``, which go to the end, or to ``position``."""
        ahead = self._mirror.upto(len(self) if position is None else position)
        ahead.commit(ahead.length, ahead.foresee(ahead.length, tokens))
        foreseen: list[int] = ahead.continuation(ahead.length, n).tolist()
        return foreseen

    def fault(self, session: SessionCore) -> str | None:
        """What the session says of itself that is not so, in words."""
        if session.position != len(self):
            return f"stands at position {session.position}, not {len(self)}"
        history = session.history
        if not np.array_equal(history, np.frombuffer(self._tokens, np.int32)):
            k = int(np.flatnonzero(history != np.frombuffer(self._tokens, np.int32))[0])
            return f"has token {history[k]} at {k} of its history, not {self._tokens[k]}"
        return None

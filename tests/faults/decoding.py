"""A client's closed loop."""

from __future__ import annotations

import shmsched
from shmsched.workers.echo import advance, answer

VOCAB = 1000
DEADLINE = 30.0


class Decoding:
    """A session in a closed loop whose every answer is checked."""

    def __init__(self, client: shmsched.Client, session: shmsched.Session | None = None) -> None:
        """In a session that is open and empty, or in one of its own."""
        self.session = session or client.open_session(timeout=DEADLINE)
        self._hash = 0

    def go_on(self, steps: int) -> None:
        for token in range(steps):
            self._hash = advance(self._hash, [token])
            assert self.session.submit([token]).result(DEADLINE).tokens.tolist() == [answer(self._hash, VOCAB)]

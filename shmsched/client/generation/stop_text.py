"""Text that ends a generation, wherever tokens divide it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from shmsched.client.generation.text_stream import TextStream
from shmsched.errors import InvalidRequest


class TextGate:
    """Gives the text of tokens up to the first stop text, and those tokens whose text lies wholly before it.

    What might be the beginning of a stop text is held back until it is known not to be.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str]) -> None:
        texts = tuple(stops) if isinstance(stops, Iterable) and not isinstance(stops, str) else (None,)
        if not all(isinstance(s, str) and s for s in texts):
            raise InvalidRequest(f"stop is {stops!r}; a sequence of texts that are not empty is wanted")
        self._stream = stream
        self._stops = tuple(text for text in texts if text is not None)
        self._given: list[str] = []
        self._fresh: list[str] = []
        self._held = ""
        self._n_given = 0
        self._waiting: deque[tuple[int, int | None]] = deque()
        """Tokens that are held back, and where the text of each ends; None while it ends within a character."""
        self.stopped = False

    @property
    def text(self) -> str:
        """All the text that may be given so far."""
        self._given = ["".join(self._given)]
        return self._given[0]

    def take(self) -> str:
        """What came to it since the last time."""
        fresh = "".join(self._fresh)
        self._fresh.clear()
        return fresh

    def push(self, token: int) -> list[int]:
        """The tokens that can be given now that ``token`` has come."""
        self._held += self._stream.push(token)
        end = None if self._stream.within_character else self._n_given + len(self._held)
        if end is not None:
            self._waiting = deque((t, end if e is None else e) for t, e in self._waiting)
        self._waiting.append((token, end))
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        if found:
            self.stopped = True
            self._give(min(found))
            self._held = ""
        else:
            self._give(len(self._held) - self._beginning_of_a_stop())
        return self._released()

    def finish(self) -> list[int]:
        """All the rest: no stop text came."""
        self._held += self._stream.finish()
        self._give(len(self._held))
        rest = [token for token, _ in self._waiting]
        self._waiting.clear()
        return rest

    def _give(self, n: int) -> None:
        self._given.append(self._held[:n])
        self._fresh.append(self._held[:n])
        self._n_given += n
        self._held = self._held[n:]

    def _released(self) -> list[int]:
        released = []
        while self._waiting:
            token, end = self._waiting[0]
            if end is None or end > self._n_given:
                break
            released.append(token)
            self._waiting.popleft()
        return released

    def _beginning_of_a_stop(self) -> int:
        """The length of the longest end of what is held that is the beginning of a stop text."""
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        for n in range(longest, 0, -1):
            if any(stop.startswith(self._held[-n:]) for stop in self._stops):
                return n
        return 0

"""Text that ends a generation, wherever tokens divide it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shmsched.arguments import STRANGE, shown, text
from shmsched.client.generation.text_stream import TextStream
from shmsched.errors import InvalidRequest


class Piece(NamedTuple):
    """A token, and the text that ends with it."""

    token: int
    text: str
    """What is given with it."""
    held: str = ""
    """What may be the beginning of a stop text, and is not."""


class TextGate:
    """Gives tokens with their text, as long as that lies wholly before the first stop text.

    What might be the beginning of a stop text is held back until it is known not to be. Text is given with the token that completes
    it, so that whoever was given a token was given the text up to there, and no more.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str]) -> None:
        self._stream = stream
        self._stops = stop_texts(stops)
        self._held = ""
        self._n_given = 0
        self._waiting: deque[tuple[int, int, int | None]] = deque()
        """Tokens that are held back: where the text ends that each completes, and where the character ends that it ends within; None
        while that is not known."""
        self.stopped = False

    def push(self, token: int) -> list[Piece]:
        """The tokens that can be given now that ``token`` has come."""
        self._held += self._stream.push(token)
        end = self._n_given + len(self._held)
        if self._stream.within_character:
            self._waiting.append((token, end, None))
        else:
            self._waiting = deque((t, e, end if c is None else c) for t, e, c in self._waiting)
            self._waiting.append((token, end, end))
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        if found:
            self.stopped = True
            end = self._n_given + min(found)
            given = self._given(end)
            self._held = self._held[: end - self._n_given]
            return given
        return self._given(end - self._beginning_of_a_stop())

    def finish(self) -> list[Piece]:
        """All the rest, with its text: no stop text came, and none can."""
        rest = [Piece(token, self._up_to(end)) for token, end, _ in self._waiting]
        self._waiting.clear()
        self._held += self._stream.finish()
        return rest

    def cut(self) -> list[Piece]:
        """All the rest, with its text held back: it goes on another time."""
        rest = [Piece(token, "", self._up_to(end)) for token, end, _ in self._waiting]
        self._waiting.clear()
        return rest

    @property
    def rest(self) -> str:
        """At the end: the text that no token completes."""
        return self._held

    def _given(self, most: int) -> list[Piece]:
        """The tokens whose text ends at ``most`` or before."""
        given = []
        while self._waiting:
            token, end, character_end = self._waiting[0]
            if character_end is None or character_end > most:
                break
            given.append(Piece(token, self._up_to(end)))
            self._waiting.popleft()
        return given

    def _up_to(self, end: int) -> str:
        text, self._held = self._held[: end - self._n_given], self._held[end - self._n_given :]
        self._n_given = end
        return text

    def _beginning_of_a_stop(self) -> int:
        """The length of the longest end of what is held that is the beginning of a stop text."""
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        for n in range(longest, 0, -1):
            if any(stop.startswith(self._held[-n:]) for stop in self._stops):
                return n
        return 0


def stop_texts(stops: object) -> tuple[str, ...]:
    """Each text of ``stops``. Raises InvalidRequest that names what is none."""
    try:
        texts = tuple(stops) if isinstance(stops, Iterable) and not isinstance(stops, str | bytes) else (None,)
    except STRANGE:
        texts = (None,)
    if not all(isinstance(s, str) and s for s in texts):
        raise InvalidRequest(f"stop is {shown(stops)}; a sequence of texts that are not empty is wanted")
    return tuple([text("stop", stop) for stop in texts])

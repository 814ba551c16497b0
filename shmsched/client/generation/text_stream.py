"""Tokens to text as they come, never in the middle of a character."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shmsched.arguments import shown
from shmsched.errors import InvalidRequest
from shmsched.steps import Tokens

REPLACEMENT = "\ufffd"
_LONGEST_PART = 3
"""The bytes of a UTF-8 character without its last. A decoder gives at most one U+FFFD for each."""


class TextStream:
    """Turns one session's tokens into increments of its text; joined, they are the text of all tokens.

    decode: a tokenizer's; a character that is not complete yet must come out as U+FFFD.
    context: the tokens before the first, so that the space before a word is not taken for the beginning of a text. Where they end
        within a character, it comes with the token that completes it.
    goes_on_with: text of the context that was not given yet, where this goes on with a text that was cut; None where it begins one.
    """

    def __init__(
        self, decode: Callable[[Tokens], str], context: Iterable[int] = (), goes_on_with: str | None = None
    ) -> None:
        self._decode_all = decode
        # What is decoded at each step: tokens since the last but one boundary between characters, so that the cost does
        # not grow with the text, and the tokens after the last boundary are never decoded as the beginning of one.
        self._window = list(context)
        self._boundary = len(self._window)
        self._fresh = goes_on_with or ""
        """Text that comes with the next token, whatever that is."""
        self._doubtful: range | None = None
        """Where the context's text ends in what may be a part of a character, or U+FFFD itself: that was there before, and is not to
        be given."""
        text = self._decode(self._window) if self._window else ""
        self._given = len(text)
        part = _incomplete(text)
        if part and goes_on_with is None:
            self._doubtful = range(len(text) - part, len(text))
        else:
            self._given -= part
        self.within_character = False
        """Whether the tokens so far end within a character."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty if it completes none."""
        self._window.append(token)
        text = self._decode(self._window)
        complete = len(text) - _incomplete(text)
        if self._doubtful is not None and complete > self._doubtful.start:
            self._given = next((i for i in self._doubtful if text[i : i + 1] != REPLACEMENT), self._doubtful.stop)
            self._doubtful = None
        increment = self._fresh + text[self._given : complete]
        self._fresh = ""
        self._given = max(self._given, complete)
        self.within_character = complete < len(text)
        if not self.within_character:
            self._move_on()
        return increment

    def finish(self) -> str:
        """The rest, if the tokens end within a character."""
        text = self._decode(self._window) if self._window else ""
        rest = self._fresh + text[self._given :]
        self._fresh, self._given = "", len(text)
        return rest

    def _decode(self, tokens: list[int]) -> str:
        text = self._decode_all(tokens)
        if not isinstance(text, str):
            raise InvalidRequest(f"the model's tokenizer returned {shown(text)} for tokens; a text (str) is wanted")
        return text

    def _move_on(self) -> None:
        recent = self._window[self._boundary :]
        text = self._decode(recent)
        if text:
            self._window, self._boundary, self._given = recent, len(recent), len(text)


def _incomplete(text: str) -> int:
    """How many characters at the end may become others with the next token."""
    n = 0
    while n < min(_LONGEST_PART, len(text)) and text[-1 - n] == REPLACEMENT:
        n += 1
    return n

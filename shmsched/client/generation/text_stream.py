"""Tokens to text as they come, never in the middle of a character."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shmsched.steps import Tokens

REPLACEMENT = "\ufffd"
_LONGEST_PART = 3
"""The bytes of a UTF-8 character without its last. A decoder gives at most one U+FFFD for each."""


class TextStream:
    """Turns one session's tokens into increments of its text; joined, they are the text of all tokens.

    decode: a tokenizer's; a character that is not complete yet must come out as U+FFFD.
    context: the tokens before the first, so that the space before a word is not taken for the beginning of a text.
    """

    def __init__(self, decode: Callable[[Tokens], str], context: Iterable[int] = ()) -> None:
        self._decode = decode
        # What is decoded at each step: tokens since the last but one boundary between characters, so that the cost does
        # not grow with the text, and the tokens after the last boundary are never decoded as the beginning of one.
        self._window = list(context)
        self._boundary = len(self._window)
        self._given = len(decode(self._window)) if self._window else 0
        self.within_character = False
        """Whether the tokens so far end within a character."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty if it completes none."""
        self._window.append(token)
        text = self._decode(self._window)
        complete = len(text) - _incomplete(text)
        increment = text[self._given : complete]
        self._given = max(self._given, complete)
        self.within_character = complete < len(text)
        if not self.within_character:
            self._move_on()
        return increment

    def finish(self) -> str:
        """The rest, if the tokens end within a character."""
        text = self._decode(self._window) if self._window else ""
        rest = text[self._given :]
        self._given = len(text)
        return rest

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

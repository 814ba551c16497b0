"""The demo's output where it is no terminal: plain lines, as a log wants them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from shmsched.cli.demo_run import Batches, BatchSeen, Stream
from shmsched.saying import counted


class View(Protocol):
    """Where the demo shows itself."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def begin(self, title: str, streams: Sequence[Stream], batches: Batches) -> None:
        """A phase begins, in which the streams and batches grow."""

    def update(self) -> None:
        """They have grown."""

    def end(self) -> None:
        """The phase is over, one way or the other."""

    def summary(self, lines: list[tuple[str, str]]) -> None:
        """The figures."""


class PlainView:
    """Texts come in pieces of about a line; batches are summed up every second."""

    LINE = 80
    BATCHES_EVERY_S = 1.0

    def __init__(self) -> None:
        self._streams: Sequence[Stream] = ()
        self._batches = Batches()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def begin(self, title: str, streams: Sequence[Stream], batches: Batches) -> None:
        self._streams, self._batches = streams, batches
        self._shown = [0] * len(streams)
        self._batches_shown = 0
        self._next = time.monotonic() + self.BATCHES_EVERY_S
        self.say(f"\n{title}")
        for stream in streams:
            self.say(f"{label(stream)} prompt: {one_line(stream.prompt)}")

    def update(self) -> None:
        for i, stream in enumerate(self._streams):
            self._show_text(i, stream, last=False)
        if time.monotonic() >= self._next:
            self._show_batches()

    def end(self) -> None:
        for i, stream in enumerate(self._streams):
            self._show_text(i, stream, last=True)
        self._show_batches()
        self._streams = ()

    def summary(self, lines: list[tuple[str, str]]) -> None:
        self.say("\nsummary")
        width = max(len(name) for name, _ in lines)
        for name, value in lines:
            self.say(f"  {name:{width}}  {value}")

    def _show_text(self, i: int, stream: Stream, last: bool) -> None:
        text = one_line(stream.text)
        while len(rest := text[self._shown[i] :]) > self.LINE or (rest and (last or stream.ended)):
            cut = len(rest) if len(rest) <= self.LINE else rest.rfind(" ", 1, self.LINE) + 1 or self.LINE
            if piece := rest[:cut].strip():
                self.say(f"{label(stream)} {piece}")
            self._shown[i] += cut

    def _show_batches(self) -> None:
        self._next = time.monotonic() + self.BATCHES_EVERY_S
        new = self._batches.seen[self._batches_shown :]
        self._batches_shown += len(new)
        if new:
            self.say(summed_up(new))


def summed_up(batches: Sequence[BatchSeen]) -> str:
    first, last, n = batches[0].number, batches[-1].number, len(batches)
    text = f"[batches {first} to {last}]" if n > 1 else f"[batch {first}]"
    decodes = sum(batch.decodes for batch in batches)
    text += f" {decodes / n:.1f} decodes each" if n > 1 else f" {decodes} decode{'' if decodes == 1 else 's'}"
    if chunks := sum(batch.prefill_chunks for batch in batches):
        tokens = sum(batch.prefill_tokens for batch in batches)
        text += f", {counted(chunks, 'prefill chunk')} ({tokens} tokens)"
    return text + f", {sum(batch.seconds for batch in batches) / n * 1000:.0f} ms{' each' if n > 1 else ''}"


def label(stream: Stream) -> str:
    return f"[client {stream.client} session {stream.session}]"


def one_line(text: str) -> str:
    """Line ends and tabs as a sign of the same length, so that a text can be shown piece by piece."""
    return text.replace("\n", " ").replace("\t", " ")

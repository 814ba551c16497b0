"""The demo's output on a terminal: all texts at once, and below them the batches."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shmsched.cli.demo_run import Batches, BatchSeen, Stream, rate_lately

TWO_COLUMNS_FROM = 70
LEAST_PANEL = 3
MOST_TEXT = 10
REFRESH_S = 0.1
FIRST_BATCHES = 8
DECODE, PREFILL = "green", "yellow"


class LiveView:
    def __init__(self) -> None:
        self._console = Console(markup=False, highlight=False, emoji=False)
        self._live: Live | None = None

    def say(self, text: str) -> None:
        self._console.print(text)

    def begin(self, title: str, streams: Sequence[Stream], batches: Batches) -> None:
        self._title, self._streams, self._batches = title, streams, batches
        self._next = 0.0
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def update(self) -> None:
        now = time.monotonic()
        if self._live is not None and now >= self._next:
            self._next = now + REFRESH_S
            self._live.update(self._screen(), refresh=True)

    def end(self) -> None:
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        self._console.rule(Text(self._title, "bold"), style="dim")
        for stream in self._streams:
            body = _text(stream)
            self._console.print(
                Panel(body, title=_label(stream), title_align="left", box=box.ROUNDED, border_style="dim")
            )
        if len(self._streams) > 1 and self._batches.seen:
            first = self._batches.seen[:FIRST_BATCHES]
            self._console.print(_batches(first, "the first batches", len(first)))

    def summary(self, lines: list[tuple[str, str]]) -> None:
        table = Table.grid(padding=(0, 2))
        for name, value in lines:
            table.add_row(Text(name, "bold"), Text(value, "bold green" if name == "ratio" else ""))
        self._console.print(Panel(table, box=box.ROUNDED, border_style="green", title="summary", title_align="left"))

    def _screen(self) -> RenderableType:
        width, height = self._console.width, self._console.height
        columns = 2 if width >= TWO_COLUMNS_FROM and len(self._streams) > 1 else 1
        rows = -(-len(self._streams) // columns)
        n_batches = 4 if height < 32 else 8
        space = height - 1 - (n_batches + 2) - 1
        panel_height = min(space // rows, MOST_TEXT + 2)
        texts = (
            self._lines(space, width)
            if panel_height < LEAST_PANEL
            else self._panels(columns, panel_height, width // columns - 4)
        )
        return Group(self._head(), texts, self._batch_panel(n_batches))

    def _head(self) -> Text:
        lately = rate_lately(self._streams, time.monotonic())
        rate = (f"   {lately:.1f} tokens/s" if lately else "", "bold green")
        return Text.assemble((self._title, "bold"), rate, no_wrap=True, overflow="ellipsis")

    def _panels(self, columns: int, height: int, width: int) -> Table:
        grid = Table.grid(expand=True)
        for _ in range(columns):
            grid.add_column(ratio=1)
        panels = [
            Panel(
                self._tail(stream, width, height - 2),
                title=_label(stream),
                title_align="left",
                box=box.ROUNDED,
                height=height,
                border_style="dim" if stream.ended else "cyan",
            )
            for stream in self._streams
        ]
        for at in range(0, len(panels), columns):
            grid.add_row(*panels[at : at + columns])
        return grid

    def _tail(self, stream: Stream, width: int, n_lines: int) -> RenderableType:
        lines = _text(stream).wrap(self._console, max(1, width))
        return Group(*lines[-n_lines:]) if lines else Text()

    def _lines(self, n: int, width: int) -> RenderableType:
        """For more sessions than there is room for panels."""
        shown = list(self._streams)[: n if len(self._streams) <= n else n - 1]
        lines: list[RenderableType] = []
        for stream in shown:
            name = f"{_label(stream)} "
            tail = " ".join((stream.prompt + stream.text).split())[-max(1, width - len(name)) :]
            lines.append(Text.assemble((name, "cyan"), tail, no_wrap=True, overflow="crop"))
        if len(shown) < len(self._streams):
            lines.append(Text(f"and {len(self._streams) - len(shown)} more", "dim"))
        return Group(*lines)

    def _batch_panel(self, n: int) -> RenderableType:
        seen = self._batches.seen[-n:]
        return _batches(seen, "batches as they form", n)


def _batches(seen: Sequence[BatchSeen], title: str, height: int) -> Panel:
    lines = [_batch_line(batch) for batch in seen] + [Text()] * (height - len(seen))
    legend = Text.assemble(f"{title}   ", ("■", DECODE), " decode  ", ("■", PREFILL), " prefill chunk")
    return Panel(Group(*lines), title=legend, title_align="left", box=box.ROUNDED, border_style="dim")


def _batch_line(batch: BatchSeen) -> Text:
    line = Text(no_wrap=True, overflow="crop")
    line.append(f"{batch.number:5}  {batch.seconds * 1000:5.0f} ms  ", "dim")
    line.append("■" * batch.prefill_chunks, PREFILL)
    line.append("■" * batch.decodes, DECODE)
    parts = []
    if batch.prefill_chunks:
        parts.append(f"{batch.prefill_chunks} prefill ({batch.prefill_tokens} tokens)")
    if batch.decodes:
        parts.append(f"{batch.decodes} decode")
    return line.append("  " + " + ".join(parts))


def _text(stream: Stream) -> Text:
    return Text.assemble((stream.prompt, "bold"), stream.text)


def _label(stream: Stream) -> str:
    return f"client {stream.client}, session {stream.session}"

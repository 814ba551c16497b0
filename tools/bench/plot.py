"""The findings as bars: each verdict as a multiple of its bar."""

from __future__ import annotations

from pathlib import Path

from rich.bar import Bar
from rich.table import Table

from shmsched.tools.bench.measure import Finding, Spread, Verdict

BEYOND = 4.0
"""Where the axis ends: a bar that is met four times over need not squeeze the others."""

WIDTH = 60


def margin(verdict: Verdict) -> Spread:
    """1 is the bar itself; more is better, whichever way the bar points."""
    spread, bar = verdict.spread, verdict.bar
    if bar.at_least:
        return Spread(*(value / bar.limit for value in (spread.median, spread.least, spread.greatest)))
    return Spread(*(bar.limit / max(value, 1e-9) for value in (spread.median, spread.greatest, spread.least)))


def in_terminal(findings: list[Finding]) -> Table:
    """A bar of characters for each verdict."""
    out = Table(title="times its bar", title_justify="left", box=None, show_header=False)
    for label, times in zip(*_rows(findings), strict=True):
        color = "green" if times.median >= 1 else "red"
        shown = f"{times.median:.2f}" if times.median < BEYOND else f"> {BEYOND:g}"
        out.add_row(label, shown, Bar(BEYOND, 0, min(times.median, BEYOND), width=WIDTH, color=color))
    return out


def to_png(findings: list[Finding], path: Path) -> None:
    """Verdicts as multiples of their bars with their spread, and beside them the runs of the contestants."""
    from matplotlib.figure import Figure

    labels, margins = _rows(findings)
    races = [finding for finding in findings if len(finding.series) > 2]
    figure = Figure(figsize=(11, 1.2 + max(0.32 * len(labels), 1.1 * len(races))), layout="constrained")
    grid = figure.add_gridspec(max(1, len(races)), 2 if races else 1)
    axes = figure.add_subplot(grid[:, 0])
    at = range(len(labels))
    axes.barh(
        at,
        [min(m.median, BEYOND) for m in margins],
        color=["tab:green" if m.median >= 1 else "tab:red" for m in margins],
    )
    axes.hlines(at, [min(m.least, BEYOND) for m in margins], [min(m.greatest, BEYOND) for m in margins], color="black")
    axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
    axes.set(yticks=at, xlim=(0, BEYOND), title="times its bar; the line is the spread")
    axes.set_yticklabels(labels, fontsize=7)
    axes.invert_yaxis()
    for row, finding in enumerate(races):
        beside = figure.add_subplot(grid[row, 1])
        spreads = [series.spread for series in finding.series]
        places = range(len(spreads))
        beside.barh(places, [s.median for s in spreads], color="tab:blue")
        beside.hlines(places, [s.least for s in spreads], [s.greatest for s in spreads], color="black")
        beside.set(yticks=places, title=f"{finding.scenario}, {finding.series[0].unit}")
        beside.set_yticklabels([series.name for series in finding.series], fontsize=7)
        beside.tick_params(axis="x", labelsize=7)
        beside.title.set_fontsize(8)
        beside.invert_yaxis()
    figure.savefig(path, dpi=110)


def _rows(findings: list[Finding]) -> tuple[list[str], list[Spread]]:
    rows = [(f"{f.scenario}: {v.what}", margin(v)) for f in findings for v in f.verdicts]
    return [label for label, _ in rows], [spread for _, spread in rows]

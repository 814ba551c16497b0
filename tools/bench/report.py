"""The findings as a table, and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from shmsched.tools.bench.measure import Finding, Spread, Verdict


def table(findings: list[Finding]) -> Table:
    """Each verdict with its bar, below what it was concluded from."""
    out = Table(title="medians, and the least and greatest of the runs", title_justify="left")
    for name in ("scenario", "what", "median", "least", "greatest", "unit", "bar", ""):
        out.add_column(
            name, justify="right" if name in ("median", "least", "greatest") else "left", no_wrap=name != "what"
        )
    for finding in findings:
        name = finding.scenario
        for series in finding.series:
            out.add_row(name, series.name, *_figures(series.spread), series.unit, "", "", style="dim")
            name = ""
        for verdict in finding.verdicts:
            met = "[green]met[/]" if verdict.met else "[red]missed[/]"
            out.add_row(name, verdict.what, *_figures(verdict.spread), verdict.unit, _bar(verdict), met)
            name = ""
        out.add_section()
    return out


def show(findings: list[Finding], machine: dict[str, str], console: Console) -> None:
    console.print(table(findings))
    for finding in findings:
        for note in finding.notes:
            console.print(f"{finding.scenario}: {note}", style="dim", highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), style="dim", highlight=False)


def to_json(findings: list[Finding], machine: dict[str, str], quick: bool) -> dict[str, Any]:
    """Every run of every contestant, and what was concluded."""
    return {
        "quick": quick,
        "machine": machine,
        "scenarios": [
            {
                "scenario": f.scenario,
                "series": [{**asdict(s), **asdict(s.spread)} for s in f.series],
                "verdicts": [{**asdict(v), **asdict(v.spread), "met": v.met} for v in f.verdicts],
                "notes": f.notes,
            }
            for f in findings
        ],
    }


def _figures(spread: Spread) -> tuple[str, str, str]:
    return figure(spread.median), figure(spread.least), figure(spread.greatest)


def figure(value: float) -> str:
    """Three digits that count, or the whole number if it has more."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _bar(verdict: Verdict) -> str:
    return f"{'≥' if verdict.bar.at_least else '≤'} {verdict.bar.limit:,g}"

"""The findings as a table with a plot, as JSON and as a picture; and what they were measured on."""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from shmsched.dataplane import BUILD
from shmsched.tools.bench.measure import Figure, Finding

Findings = Mapping[str, Finding]
"""By scenario."""
PACKAGES = ("shmsched", "numpy", "pyzmq", "msgspec")
BEYOND = 4.0
"""Where the plot's axis ends: a bar that is met four times over need not squeeze the others."""


def machine() -> dict[str, str]:
    """The processor, the system, the versions of what takes part, and how busy others kept the machine in the last minute."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    cores = len(os.sched_getaffinity(0))
    return {
        "processor": f"{found[1] if found else platform.machine()}, {cores} cores",
        "system": f"Linux {platform.release()}",
        "python": sys.version.split()[0],
        "build": BUILD,
        "load average": f"{os.getloadavg()[0]:.1f} before",
        **{name: version(name) for name in PACKAGES},
    }


def show(findings: Findings, machine: dict[str, str], console: Console) -> None:
    """Each figure with its bar, below what it was concluded from."""
    table = Table(title="medians, and the least and greatest of the runs", title_justify="left")
    for name in ("scenario", "what", "median", "least", "greatest", "unit", "bar", "", "times its bar"):
        number = name in ("median", "least", "greatest")
        table.add_column(name, justify="right" if number else "left", no_wrap=name != "what")
    for scenario, finding in findings.items():
        name = scenario
        for f in finding.figures:
            conclusion = _conclusion(f) if f.bar else []
            table.add_row(name, f.what, *map(figure, f.spread), f.unit, *conclusion, style=None if f.bar else "dim")
            name = ""
        table.add_section()
    console.print(table)
    for scenario, finding in findings.items():
        for note in finding.notes:
            console.print(f"{scenario}: {note}", style="dim", highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), style="dim", highlight=False)


def _conclusion(f: Figure) -> list[str | Bar]:
    assert f.bar is not None
    color = "green" if f.met else "red"
    bar = Bar(BEYOND, 0, min(f.times_bar, BEYOND), width=20, color=color)
    return [f"{'≥' if f.bar.at_least else '≤'} {f.bar.limit:,g}", f"[{color}]{'met' if f.met else 'missed'}[/]", bar]


def to_json(findings: Findings, machine: dict[str, str], quick: bool) -> dict[str, Any]:
    """Every run of every contestant, and what was concluded."""

    def document(f: Figure) -> dict[str, Any]:
        median, least, greatest = f.spread
        return {**asdict(f), "median": median, "least": least, "greatest": greatest, "met": f.met if f.bar else None}

    scenarios = [
        {"scenario": scenario, "figures": list(map(document, finding.figures)), "notes": finding.notes}
        for scenario, finding in findings.items()
    ]
    return {"quick": quick, "machine": machine, "scenarios": scenarios}


def to_png(findings: Findings, path: Path) -> None:
    """Medians as multiples of their bars, and their spread."""
    import matplotlib.figure

    rows = [(f"{name}: {f.what}", f, f.bar) for name, finding in findings.items() for f in finding.figures if f.bar]
    picture = matplotlib.figure.Figure(figsize=(9, 1.2 + 0.32 * len(rows)), layout="constrained")
    axes = picture.add_subplot()
    for at, (_, f, bar) in enumerate(rows):
        median, *ends = (min(bar.times(value), BEYOND) for value in f.spread)
        axes.barh(at, median, color="tab:green" if f.met else "tab:red")
        axes.hlines(at, min(ends), max(ends), color="black")
    axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
    axes.set(xlim=(0, BEYOND), title="times its bar; the line is the spread")
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows], fontsize=7)
    axes.invert_yaxis()
    picture.savefig(path, dpi=110)


def figure(value: float) -> str:
    """Three digits that count, or the whole number if it has more."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"

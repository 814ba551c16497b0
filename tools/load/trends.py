"""The table of what daemon and engines held over time."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from shmsched.tools.load.run import Outcome
from shmsched.tools.load.trend import LEAST_SAMPLES, Series


def watched(outcome: Outcome) -> list[tuple[str, str, Series]]:
    """Process, quantity and course of all that was sampled."""
    return [
        (held.name, quantity, series)
        for held in outcome.watch.processes
        for quantity, series in held.series.items()
        if series.values
    ]


def series_to_json(name: str, quantity: str, series: Series) -> dict[str, Any]:
    return {
        "process": name,
        "quantity": quantity,
        "unit": series.unit,
        "samples": len(series.values),
        "first": _rounded(series.values[0]),
        "last": _rounded(series.values[-1]),
        "peak": _rounded(series.peak),
        "slope_per_minute": _rounded(series.slope),
        "growth": _rounded(series.growth),
        "bound": series.bound,
        "flat": series.is_flat,
    }


def rows(outcome: Outcome) -> list[tuple[str, str, bool | None]]:
    """The verdict in a line of the run's own table: whether all that must be flat is."""
    judged = [(name, quantity, series) for name, quantity, series in outcome.judged if series.values]
    if not judged:
        return []
    if any(series.is_flat is None for _, _, series in judged):
        return [("flat", f"too short to tell: at least {LEAST_SAMPLES} samples are needed", None)]
    grown = [entry for entry in judged if not entry[2].is_flat]
    said = [f"{name} {quantity} {_number(series.growth, series.unit)}" for name, quantity, series in grown or judged]
    return [("GROWS" if grown else "flat", ", ".join(said), not grown)]


def show(outcome: Outcome, console: Console) -> None:
    """Print it, if anything was sampled."""
    found = watched(outcome)
    if not found:
        return
    judged = {id(series) for _, _, series in outcome.judged}
    table = Table(title="held over time", title_justify="left")
    table.add_column("process", no_wrap=True)
    table.add_column("quantity", no_wrap=True)
    for heading in ("first", "last", "peak", "a minute", "growth", "at most"):
        table.add_column(heading, justify="right")
    for name, quantity, series in found:
        is_judged = id(series) in judged
        style = "bold red" if is_judged and series.is_flat is False else ""
        bound = _number(series.bound, series.unit) if is_judged else "not judged"
        numbers = (series.values[0], series.values[-1], series.peak, series.slope, series.growth)
        table.add_row(name, quantity, *(_number(number, series.unit) for number in numbers), bound, style=style)
    console.print(table)
    console.print(
        "growth: from the middle third of the samples to the last, by mean and by least; memory: resident and not shared",
        style="dim",
        soft_wrap=True,
    )


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:,.1f} {unit}".rstrip()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)

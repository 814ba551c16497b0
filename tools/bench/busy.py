"""Scenario ``busy``: how much of its time an engine with work to do is kept at it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from shmsched import Control
from shmsched.tools.bench.contestant import Contestant
from shmsched.tools.bench.measure import Bar, Effort, Finding, Series, Verdict, alternate
from shmsched.tools.bench.plan import Plan, Transport

NAME = "busy"
STEP_US = 10_000
LEAST_S = 1.0
PLAN = Plan(transport=Transport.SHMSCHED, clients=4, sessions=8, batch=32, step_us=STEP_US)
DRIVERS = {"client-driven": (False, 90.0), "scheduler-driven": (True, 96.0)}
"""Whether the scheduler continues by itself, and the bar."""


def run(effort: Effort) -> Finding:
    """The engine sleeps 10 ms a batch. Busy are those 10 ms, and nothing of what surrounds them."""
    busy: dict[str, list[float]] = {name: [] for name in DRIVERS}
    sizes: dict[str, list[float]] = {name: [] for name in DRIVERS}
    with ExitStack() as stack:
        runs: dict[str, Callable[[], float]] = {}
        for name, (streamed, _) in DRIVERS.items():
            contestant = stack.enter_context(Contestant(replace(PLAN, streamed=streamed)))
            assert contestant.socket is not None
            control = stack.enter_context(Control(contestant.socket))
            runs[name] = _runner(contestant, control, effort, busy[name], sizes[name])
        values = alternate(runs, effort)
    finding = Finding(scenario=NAME)
    finding.series = [Series(name=name, unit="steps/s", values=got) for name, got in values.items()]
    for name, (_, bar) in DRIVERS.items():
        finding.verdicts.append(Verdict(what=f"engine busy, {name}", unit="%", values=busy[name], bar=Bar(limit=bar)))
    finding.verdicts.append(
        Verdict(
            what="mean batch of 32, client-driven", unit="steps", values=sizes["client-driven"], bar=Bar(limit=30.0)
        )
    )
    return finding


def _runner(
    contestant: Contestant, control: Control, effort: Effort, busy: list[float], sizes: list[float]
) -> Callable[[], float]:
    def run() -> float:
        before = _engine(control)
        result = contestant.run(effort.warm_up, max(LEAST_S, effort.seconds))
        after = _engine(control)
        sizes.append((after["steps"] - before["steps"]) / (after["batches"] - before["batches"]))
        busy.append(result.steps_per_s / sizes[-1] * STEP_US / 1e6 * 100)
        return result.steps_per_s

    return run


def _engine(control: Control) -> dict[str, Any]:
    engine: dict[str, Any] = control.status()["engines"][0]
    return engine

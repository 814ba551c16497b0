"""Scenario ``core``: the in-process ``Scheduler`` by itself, in one thread."""

from __future__ import annotations

from shmsched.tools.bench.in_process import StepCost, cost_of_a_step
from shmsched.tools.bench.measure import Bar, Effort, Finding, Series, Verdict, alternate

NAME = "core"


def run(effort: Effort) -> Finding:
    """Submit, get_work and complete, 32 sessions, with futures and less what futures alone cost. In CPU time."""
    without: list[float] = []

    def once() -> float:
        cost: StepCost = cost_of_a_step(effort.seconds)
        without.append(cost.steps_per_s_without_futures)
        return cost.steps_per_s

    (whole,) = alternate({"with futures": once}, effort).values()
    return Finding(
        scenario=NAME,
        series=[Series(name="with futures", unit="steps/s", values=whole)],
        verdicts=[Verdict(what="without futures' own cost", unit="steps/s", values=without, bar=Bar(limit=300_000))],
    )

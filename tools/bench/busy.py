"""Scenarios ``busy`` and ``busy-wide``: how much of its time an engine with work to do is kept at it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from shmsched.tools.bench.contestant import Contestant
from shmsched.tools.bench.measure import Bar, Effort, Figure, Finding, alternate, figures
from shmsched.tools.bench.plan import Gauge, Plan, Way

LEAST_S = 1.0
ENGINE = "shmsched.tools.bench.engines:Clocked?step_us=10000"


def run(
    sessions: int, client_driven: float, scheduler_driven: float, mean_batch: Bar | None, effort: Effort
) -> Finding:
    """Four clients with so many sessions each, and bars. The engine is busy while it is in ``forward``, by its own clock: it sleeps
    10 ms there (which on an idle core take up to 0.3 more), and looks up its answers. Not busy is it while its host, the scheduler
    and the clients hand over."""
    batch = 4 * sessions
    plan = Plan(clients=4, sessions=sessions, batch=batch, engine=ENGINE, gauge=Gauge.BUSY)
    bars = {"client-driven": Bar(client_driven), "scheduler-driven": Bar(scheduler_driven)}
    with Contestant(plan) as clients, Contestant(replace(plan, way=Way.STREAM)) as scheduler:
        times = effort.warm_up, max(LEAST_S, effort.seconds)
        runs = (partial(contestant.run, *times) for contestant in (clients, scheduler))
        results = alternate(dict(zip(bars, runs, strict=True)), effort)
    sizes = [result.engine["steps"] / result.engine["batches"] for result in results["client-driven"]]
    return Finding(
        [
            *figures({name: [result.steps_per_s for result in got] for name, got in results.items()}, "steps/s"),
            *(Figure(f"engine busy, {n}", "%", [r.gauged for r in results[n]], bar) for n, bar in bars.items()),
            Figure(f"mean batch of {batch}, client-driven", "steps", sizes, mean_batch),
        ],
    )

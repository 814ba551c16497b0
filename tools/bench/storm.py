"""Scenario ``storm``: eight sessions decode while prompts of 100,000 tokens stream in."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from shmsched.tools.bench.contestant import Contestant
from shmsched.tools.bench.measure import Bar, Effort, Figure, Finding, alternate, figures, ratio
from shmsched.tools.bench.plan import Gauge, Plan, Way

ENGINE = "shmsched.tools.bench.engines:Numbered?step_us=2000&token_us=10"
"""A full batch, 512 tokens of prompts and eight decodes, takes 7.2 ms."""
STORM = Plan(clients=2, sessions=8, batch=32, way=Way.STORM, engine=ENGINE, gauge=Gauge.TOGETHER)
LEAST_S = 1.5
ALONE, STORMY = "prefill alone", "prefill in the storm"


def run(effort: Effort) -> Finding:
    """Prompts come from a process of their own: making them must not hold up those who decode."""
    times = effort.warm_up, max(LEAST_S, effort.seconds)
    with Contestant(replace(STORM, clients=1)) as alone, Contestant(STORM) as storm:
        results = alternate({ALONE: partial(alone.run, *times), STORMY: partial(storm.run, *times)}, effort)
    values = {
        ALONE: [result.engine["tokens"] for result in results[ALONE]],
        STORMY: [result.engine["tokens"] - result.steps_per_s for result in results[STORMY]],
    }
    together = [result.gauged for result in results[STORMY]]
    return Finding(
        [
            *figures(values, "tokens/s"),
            ratio(values, STORMY, ALONE, Bar(0.9)),
            Figure("batches with all eight decodes", "%", together, Bar(95.0)),
        ],
    )

"""The scenarios by name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shmsched.tools.bench import busy, core, depth, model, races, resting, storm
from shmsched.tools.bench.measure import Bar, Effort, Finding


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is measured, in a line, and how."""

    measures: str
    run: Callable[[Effort], Finding]


SCENARIOS = {
    **{name: Scenario(race.measures, race.run) for name, race in races.RACES.items()},
    "busy": Scenario("echo with 10 ms steps, 4 x 8 sessions", partial(busy.run, 8, 92.0, 98.0, Bar(30.0))),
    "busy-wide": Scenario("the same with 4 x 64 sessions, batch 256", partial(busy.run, 64, 80.0, 96.0, None)),
    "storm": Scenario("8 sessions decode while 100,000-token prompts stream in", storm.run),
    "depth": Scenario("the cost of a step with much queued, connected and open", depth.run),
    "core": Scenario("the in-process Scheduler beside a deque and futures", core.run),
    "model": Scenario("Gemma 3 270M in llama.cpp, 16 sessions of 4 clients, greedy decode", model.run),
    "idle": Scenario("daemon, engine and clients with nothing to do", resting.run_idle),
    "memory": Scenario("the daemon with 64 clients and 10,000 sessions", resting.run_memory),
}

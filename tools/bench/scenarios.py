"""The scenarios by name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shmsched.tools.bench import busy, core, depth, model, races, resting, storm
from shmsched.tools.bench.measure import Effort, Finding


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is measured, in a line, and how."""

    measures: str
    run: Callable[[Effort], Finding]


SCENARIOS = {
    "decode": Scenario("4 clients x 8 sessions, tokens only, batch 32", races.DECODE.run),
    "decode-wide": Scenario("4 clients x 64 sessions, tokens only, batch 256", races.DECODE_WIDE.run),
    "raw-32k": Scenario("4 x 8, raw logits, vocabulary of 32,000", races.RAW.run),
    "raw-128k": Scenario("4 x 8, raw logits, vocabulary of 128,000", races.RAW_WIDE.run),
    "roundtrip": Scenario("1 client, 1 session, from submit to result", races.ROUNDTRIP.run),
    races.CONTINUATION: Scenario("generations driven by the scheduler, 4 x 8 sessions", races.run_continuation),
    busy.NAME: Scenario("echo with 10 ms steps, 4 x 8 sessions", busy.run),
    storm.NAME: Scenario("8 sessions decode while 100,000-token prompts stream in", storm.run),
    depth.NAME: Scenario("the cost of a step with much queued, connected and open", depth.run),
    core.NAME: Scenario("the in-process Scheduler alone", core.run),
    model.NAME: Scenario("Gemma 3 270M in llama.cpp, 16 sessions of 4 clients, greedy decode", model.run),
    resting.IDLE: Scenario("daemon, engine and clients with nothing to do", resting.run_idle),
    resting.MEMORY: Scenario("the daemon with 64 clients and 10,000 sessions", resting.run_memory),
}

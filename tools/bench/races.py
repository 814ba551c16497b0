"""Scenarios in which transports carry the same load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from shmsched.tools.bench.contestant import Contestant
from shmsched.tools.bench.measure import Bar, Effort, Finding, alternate, figures, ratio
from shmsched.tools.bench.plan import Gauge, Plan, RoundResult, Transport, Way
from shmsched.tools.bench.processes import told

OURS, BESIDE = Transport.SHMSCHED.value, "beside"
ZMQ, MPQUEUE, INPROC, LIMIT = Transport.ZMQ, Transport.MPQUEUE, Transport.INPROC, Transport.LIMIT


@dataclass(frozen=True, slots=True)
class Race:
    """The same load for every contestant, and bars for our ratio to others."""

    measures: str
    """In a line."""
    load: Plan
    """Ours. Peers wait for results where the scheduler drives: they know no other way."""
    bars: Mapping[Transport, Bar | None]
    """For each peer. None: shown, and no more."""
    beside: Bar | None = None
    """For another shmsched, which is asked for in place of the peers. None: to be no worse."""

    def run(self, effort: Effort) -> Finding:
        latency = self.load.gauge is Gauge.LATENCY
        bars = {transport.value: bar for transport, bar in self.bars.items()}
        if effort.beside:
            bars = {BESIDE: self.beside or Bar(1.0, at_least=not latency)}
        with ExitStack() as stack:
            runs: dict[str, Callable[[], RoundResult]] = {}
            for other in (OURS, *bars):
                effort.show(f"{other} starts")
                contestant = stack.enter_context(self._start(other, effort))
                runs[other] = partial(contestant.run, effort.warm_up, effort.seconds)
            results = alternate(runs, effort)
        values = {other: [r.gauged if latency else r.steps_per_s for r in got] for other, got in results.items()}
        ratios = [ratio(values, OURS, other, bar) for other, bar in bars.items() if bar]
        cpu = told({other: [r.cpu_us for r in got] for other, got in results.items()})
        return Finding(figures(values, "us, p50" if latency else "steps/s") + ratios, [cpu])

    def _start(self, name: str, effort: Effort) -> Contestant:
        if name in (OURS, BESIDE):
            return Contestant(self.load, effort.beside if name == BESIDE else None)
        way = Way.RESULTS if self.load.way is Way.STREAM else self.load.way
        return Contestant(replace(self.load, transport=Transport(name), way=way))


FOUR = Plan(clients=4, sessions=8, batch=32)
WIDE = Plan(clients=4, sessions=64, batch=256)
TASKS = Plan(clients=1, sessions=64, batch=64, way=Way.ASYNCIO)
ALONE = Plan(clients=1, sessions=1, batch=32, gauge=Gauge.LATENCY)
RAW, RAW_WIDE = replace(FOUR, raw=True), replace(FOUR, raw=True, vocab=128_000)
CALLBACKS, STREAM = replace(FOUR, way=Way.CALLBACKS), replace(FOUR, way=Way.STREAM)
RACES = {
    "decode": Race(
        "4 clients x 8 sessions, tokens only, batch 32",
        FOUR,
        {ZMQ: Bar(2.0), MPQUEUE: Bar(5.0), INPROC: Bar(1.3), LIMIT: Bar(0.4)},
        beside=Bar(1.2),
    ),
    "decode-wide": Race(
        "4 clients x 64 sessions, tokens only, batch 256", WIDE, {ZMQ: Bar(3.0), INPROC: Bar(2.0), LIMIT: Bar(0.4)}
    ),
    "callbacks": Race("4 x 8, done-callbacks feed a queue, and another thread submits", CALLBACKS, {ZMQ: Bar(1.5)}),
    "asyncio": Race("64 sessions of one process, a task each", TASKS, {ZMQ: Bar(1.5)}),
    "raw-32k": Race("4 x 8, raw logits, vocabulary of 32,000", RAW, {ZMQ: Bar(7.0), LIMIT: Bar(0.4)}),
    "raw-128k": Race("4 x 8, raw logits, vocabulary of 128,000", RAW_WIDE, {ZMQ: Bar(7.0), LIMIT: Bar(0.75)}),
    "roundtrip": Race("1 client, 1 session, from submit to result", ALONE, {ZMQ: Bar(0.6, False), LIMIT: None}),
    "continuation": Race("generations driven by the scheduler, 4 x 8 sessions", STREAM, {ZMQ: Bar(6.0)}),
}

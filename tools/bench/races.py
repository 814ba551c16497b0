"""Scenarios in which all transports carry the same load."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from shmsched.tools.bench.contestant import Contestant
from shmsched.tools.bench.measure import Bar, Effort, Finding, Series, Verdict, alternate, ratios
from shmsched.tools.bench.plan import RACING, Plan, RoundResult, Transport
from shmsched.tools.bench.processes import Seconds, told

OURS = Transport.SHMSCHED


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """The same load for every contestant, and bars for our ratio to others."""

    name: str
    load: Plan
    """Its transport is each contestant's in turn."""
    bars: dict[Transport, Bar]
    figure: Callable[[RoundResult], float] = lambda result: result.steps_per_s
    unit: str = "steps/s"

    def run(self, effort: Effort) -> Finding:
        cpu: dict[str, list[Seconds]] = {transport.value: [] for transport in RACING}
        with ExitStack() as stack:
            runs: dict[str, Callable[[], float]] = {}
            for transport in RACING:
                effort.show(f"{transport.value} starts")
                contestant = stack.enter_context(Contestant(replace(self.load, transport=transport)))
                runs[transport.value] = self.runner(contestant, effort, cpu[transport.value])
            values = alternate(runs, effort)
        finding = Finding(scenario=self.name, notes=[_cpu_note(cpu)])
        finding.series = [Series(name=name, unit=self.unit, values=got) for name, got in values.items()]
        finding.verdicts = [
            Verdict(
                what=f"{OURS.value} / {other.value}",
                unit="x",
                values=ratios(values[OURS.value], values[other.value]),
                bar=bar,
            )
            for other, bar in self.bars.items()
        ]
        return finding

    def runner(self, contestant: Contestant, effort: Effort, cpu: list[Seconds]) -> Callable[[], float]:
        def run() -> float:
            result = contestant.run(effort.warm_up, effort.seconds)
            cpu.append(result.cpu_us)
            return self.figure(result)

        return run


def _cpu_note(cpu: dict[str, list[Seconds]]) -> str:
    """A step's way through all processes, and where it spends itself."""
    return "CPU of a step, us: " + "; ".join(filter(None, [told(name, rounds) for name, rounds in cpu.items()]))


def _load(clients: int, sessions: int, batch: int, *, vocab: int = 32_000, raw: bool = False) -> Plan:
    return Plan(transport=OURS, clients=clients, sessions=sessions, batch=batch, vocab=vocab, raw=raw)


CONTINUATION = "continuation"
ZMQ, MPQUEUE, LIMIT = Transport.ZMQ, Transport.MPQUEUE, Transport.LIMIT

DECODE = Race(name="decode", load=_load(4, 8, 32), bars={ZMQ: Bar(limit=2.0), MPQUEUE: Bar(limit=5.0)})
DECODE_WIDE = Race(name="decode-wide", load=_load(4, 64, 256), bars={ZMQ: Bar(limit=2.0)})
RAW = Race(name="raw-32k", load=_load(4, 8, 32, raw=True), bars={ZMQ: Bar(limit=7.0), LIMIT: Bar(limit=0.3)})
RAW_WIDE = Race(
    name="raw-128k", load=_load(4, 8, 32, vocab=128_000, raw=True), bars={ZMQ: Bar(limit=7.0), LIMIT: Bar(limit=0.7)}
)
ROUNDTRIP = Race(
    name="roundtrip",
    load=_load(1, 1, 32),
    bars={ZMQ: Bar(limit=0.6, at_least=False)},
    figure=lambda result: result.p50_us,
    unit="us, p50",
)


def run_continuation(effort: Effort) -> Finding:
    """Generations that our scheduler drives, beside the steps that ``zmq``'s clients drive."""
    load = _load(4, 8, 32)
    cpu: dict[str, list[Seconds]] = {"shmsched": [], "zmq": []}
    with (
        Contestant(replace(load, streamed=True)) as ours,
        Contestant(replace(load, transport=ZMQ)) as theirs,
    ):
        runs = {
            "shmsched, continued": DECODE.runner(ours, effort, cpu["shmsched"]),
            "zmq, decode": DECODE.runner(theirs, effort, cpu["zmq"]),
        }
        values = alternate(runs, effort)
    continued, decode = values.values()
    return Finding(
        scenario=CONTINUATION,
        series=[Series(name=name, unit="steps/s", values=got) for name, got in values.items()],
        verdicts=[
            Verdict(what="shmsched, continued / zmq", unit="x", values=ratios(continued, decode), bar=Bar(limit=4.0))
        ],
        notes=[_cpu_note(cpu)],
    )

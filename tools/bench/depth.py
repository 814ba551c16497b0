"""Scenario ``depth``: what a step costs does not grow with what is queued, connected or open."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from shmsched import Client
from shmsched.tools.bench.contestant import Contestant
from shmsched.tools.bench.in_process import cost_of_a_step
from shmsched.tools.bench.measure import Bar, Effort, Finding, Series, Verdict, alternate, ratios
from shmsched.tools.bench.plan import Plan, Transport

NAME = "depth"
FLAT = Bar(limit=1.25, at_least=False)
QUEUED = 100, 100_000
CLIENTS = 1, 64
SESSIONS = 10, 10_000
PLAN = Plan(transport=Transport.SHMSCHED, clients=1, sessions=8, batch=32, max_sessions=16_384)


def run(effort: Effort) -> Finding:
    """Queued: in the ``Scheduler``. Clients and sessions: idle ones, beside one client with eight sessions that decode."""
    finding = Finding(scenario=NAME)
    runs = {f"{n:,} queued": partial(_cost_beside, n, effort.seconds) for n in QUEUED}
    _add(finding, alternate(runs, effort))
    with ExitStack() as stack:
        few, clients, sessions = (stack.enter_context(Contestant(PLAN)) for _ in range(3))
        effort.show("clients connect, sessions open")
        for _ in range(CLIENTS[1] - CLIENTS[0]):
            stack.enter_context(Client(socket=clients.socket))
        beside = stack.enter_context(Client(socket=sessions.socket))
        for _ in range(SESSIONS[1] - PLAN.sessions):
            beside.open_session()
        beside = stack.enter_context(Client(socket=few.socket))
        for _ in range(SESSIONS[0] - PLAN.sessions):
            beside.open_session()

        names = f"{SESSIONS[0]} sessions, {CLIENTS[0]} client", f"{CLIENTS[1]} clients", f"{SESSIONS[1]:,} sessions"
        runs = {name: partial(_cost, c, effort) for name, c in zip(names, (few, clients, sessions), strict=True)}
        values = alternate(runs, effort)
    base, *others = names
    for other in others:
        _add(finding, {base: values[base], other: values[other]})
    return finding


def _cost_beside(queued: int, seconds: float) -> float:
    return cost_of_a_step(seconds, queued=queued).step * 1e6


def _cost(contestant: Contestant, effort: Effort) -> float:
    return 1e6 / contestant.run(effort.warm_up, effort.seconds).steps_per_s


def _add(finding: Finding, values: dict[str, list[float]]) -> None:
    (few, costs), (many, more) = values.items()
    known = {series.name for series in finding.series}
    finding.series += [Series(name=n, unit="us/step", values=got) for n, got in values.items() if n not in known]
    finding.verdicts.append(Verdict(what=f"{many} / {few}", unit="x", values=ratios(more, costs), bar=FLAT))

"""Scenario ``depth``: what a step costs does not grow with what is queued, connected or open."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from shmsched import Client
from shmsched.tools.bench.contestant import Contestant
from shmsched.tools.bench.core import step_s
from shmsched.tools.bench.measure import Bar, Effort, Finding, alternate, figures, ratio
from shmsched.tools.bench.plan import Plan

FLAT = Bar(1.25, at_least=False)
QUEUED = 100, 100_000
CLIENTS = 1, 64
SESSIONS = 10, 10_000
PLAN = Plan(clients=1, sessions=8, batch=32, max_sessions=16_384)


def run(effort: Effort) -> Finding:
    """Queued: in the ``Scheduler``. Clients and sessions: idle ones, beside one client with eight sessions that decode."""
    base, clients, sessions = f"{SESSIONS[0]} sessions, 1 client", f"{CLIENTS[1]} clients", f"{SESSIONS[1]:,} sessions"
    few, many = (f"{n:,} queued" for n in QUEUED)
    queued = alternate(
        {name: partial(_cost_beside, n, effort) for name, n in zip((few, many), QUEUED, strict=True)}, effort
    )
    with ExitStack() as stack:
        contestants = {name: stack.enter_context(Contestant(PLAN)) for name in (base, clients, sessions)}
        effort.show("clients connect, sessions open")
        for _ in range(CLIENTS[1] - CLIENTS[0]):
            stack.enter_context(Client(socket=contestants[clients].socket))
        for name, n in ((sessions, SESSIONS[1]), (base, SESSIONS[0])):
            beside = stack.enter_context(Client(socket=contestants[name].socket))
            for _ in range(n - PLAN.sessions):
                beside.open_session()
        costs = alternate({name: partial(_cost, c, effort) for name, c in contestants.items()}, effort)
    ratios = [ratio(queued, many, few, FLAT), *(ratio(costs, name, base, FLAT) for name in (clients, sessions))]
    return Finding([*figures(queued, "us/step"), *figures(costs, "us/step"), *ratios])


def _cost_beside(queued: int, effort: Effort) -> float:
    return 1e6 * step_s(effort.seconds, queued)


def _cost(contestant: Contestant, effort: Effort) -> float:
    return 1e6 / contestant.run(effort.warm_up, effort.seconds).steps_per_s

"""Scenarios ``idle`` and ``memory``: what a daemon takes when nobody asks it for anything, and what it holds."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from pathlib import Path

from shmsched import Client, launch
from shmsched.tools.bench.contestant import Contestant
from shmsched.tools.bench.measure import Bar, Effort, Figure, Finding, alternate
from shmsched.tools.bench.plan import Plan
from shmsched.tools.bench.processes import spent

IDLE_S = 2.0
IDLING = Plan(clients=4, sessions=1, batch=32)
CLIENTS, SESSIONS = 64, 10_000


def run_idle(effort: Effort) -> Finding:
    """A daemon, an engine and four client processes, each with a session that has done something."""
    with Contestant(IDLING) as contestant:
        contestant.run(effort.warm_up, effort.seconds)

        def once() -> float:
            before, began = spent(contestant.processes), time.monotonic()
            time.sleep(max(IDLE_S, effort.seconds))
            taken = sum(spent(contestant.processes).values()) - sum(before.values())
            return 100 * taken / (time.monotonic() - began)

        (values,) = alternate({"together": once}, effort).values()
    what = f"daemon, engine and {IDLING.clients} clients together"
    return Finding([Figure(what, "% of a core", values, Bar(0.5, at_least=False))])


def run_memory(effort: Effort) -> Finding:
    """The daemon's resident memory with 64 clients, 10,000 sessions that have each run a step, and no arena."""
    values: list[float] = []
    empty: list[float] = []
    for number in range(effort.rounds):
        effort.show(f"round {number + 1}")
        with launch("echo?max_sessions=16384") as cluster, ExitStack() as stack:
            empty.append(_resident_mb(cluster.pid))
            clients = [stack.enter_context(Client(socket=cluster.socket)) for _ in range(CLIENTS)]
            sessions = [clients[i % CLIENTS].open_session() for i in range(SESSIONS)]
            for future in [session.submit([1]) for session in sessions]:
                future.result(60)
            values.append(_resident_mb(cluster.pid))
    what = f"daemon with {CLIENTS} clients and {SESSIONS:,} sessions"
    bar = Bar(80.0, at_least=False)
    return Finding([Figure("without clients", "MB", empty), Figure(what, "MB", values, bar)])


def _resident_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6

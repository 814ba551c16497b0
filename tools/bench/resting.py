"""Scenarios ``idle`` and ``memory``: what a daemon takes when nobody asks it for anything, and what it holds."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from shmsched import Client, Cluster, launch
from shmsched.tools.bench.measure import Bar, Effort, Finding, Series, Verdict, alternate

IDLE, MEMORY = "idle", "memory"
IDLE_CLIENTS = 4
CLIENTS, SESSIONS = 64, 10_000
IDLE_S = 2.0
CLIENT = (
    "import sys, shmsched\n"
    "with shmsched.Client(socket=sys.argv[1]) as client, client.open_session() as session:\n"
    "    session.submit([1]).result(30)\n"
    "    print('ready', flush=True)\n"
    "    sys.stdin.read()\n"
)


def run_idle(effort: Effort) -> Finding:
    """A daemon, an engine and four client processes, each with a session that has done something."""
    with launch("echo") as cluster, ExitStack() as stack:
        pids = _pids(cluster)
        for _ in range(IDLE_CLIENTS):
            client = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-P", "-c", CLIENT, cluster.socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            )
            stack.callback(client.kill)
            assert client.stdout is not None
            client.stdout.readline()
            pids.append(client.pid)

        def once() -> float:
            before, began = _cpu_s(pids), time.monotonic()
            time.sleep(max(IDLE_S, effort.seconds))
            return (_cpu_s(pids) - before) / (time.monotonic() - began) * 100

        values = alternate({"together": once}, effort)["together"]
    what = f"daemon, engine and {IDLE_CLIENTS} clients together"
    return Finding(
        scenario=IDLE,
        verdicts=[Verdict(what=what, unit="% of a core", values=values, bar=Bar(limit=0.5, at_least=False))],
    )


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
    return Finding(
        scenario=MEMORY,
        series=[Series(name="without clients", unit="MB", values=empty)],
        verdicts=[
            Verdict(
                what=f"daemon with {CLIENTS} clients and {SESSIONS:,} sessions",
                unit="MB",
                values=values,
                bar=Bar(limit=80.0, at_least=False),
            )
        ],
    )


def _pids(cluster: Cluster) -> list[int]:
    return [cluster.pid, *(engine["pid"] for engine in cluster.status()["engines"])]


def _cpu_s(pids: list[int]) -> float:
    """What all their threads have run. The first field of schedstat is in nanoseconds; stat's times are in clock ticks."""
    paths = [path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(path.read_text().split()[0]) for path in paths) / 1e9


def _resident_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6

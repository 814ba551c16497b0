"""shmsched itself: a daemon of its own with an echo engine, and clients through the public API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import shmsched
from shmsched.tools.bench.crew import Crew
from shmsched.tools.bench.load import Rounds, rounds, streams
from shmsched.tools.bench.plan import Plan
from shmsched.tools.bench.processes import Role

MANY_TOKENS = 100_000_000
"""More than a session gets in a run."""


def start(plan: Plan, crew: Crew, stack: ExitStack) -> str:
    sizes = f"max_sessions={plan.max_sessions}&max_session_tokens={MANY_TOKENS}"
    spec = f"{plan.engine}?vocab={plan.vocab}&step_us={plan.step_us}&{sizes}"
    cluster = stack.enter_context(shmsched.launch(spec, max_decode_sequences=plan.batch))

    @contextmanager
    def open_client(index: int) -> Iterator[Rounds]:
        with shmsched.Client(socket=cluster.socket) as client:
            sessions = [client.open_session() for _ in range(plan.sessions)]
            yield streams(sessions, plan) if plan.streamed else rounds(sessions, plan)

    crew.fork(open_client)
    crew.knows(Role.SCHEDULER, cluster.pid)
    crew.knows(Role.ENGINE, cluster.status()["engines"][0]["pid"])
    return str(cluster.socket)

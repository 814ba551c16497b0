"""shmsched itself: a daemon of its own with an engine of echo's kind, or a real model's, and clients through the public API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np

import shmsched
from shmsched.tools.bench.crew import Crew, Rounds
from shmsched.tools.bench.load import FURTHER, Cursor, Watch, cursors_of, drive_streams, over, rounds, rounds_in_loop
from shmsched.tools.bench.model import MOST, prompt
from shmsched.tools.bench.plan import Plan, Round, Tally, Way
from shmsched.workers.echo import advance, answer

MANY_TOKENS = 100_000_000
"""More than a session gets in a run."""
LONG_PROMPT = np.arange(100_000, dtype=np.int32) % 30_000
STREAMING = 2
"""Sessions that long prompts stream into."""


def start(plan: Plan, crew: Crew, stack: ExitStack) -> str:
    options = f"vocab={plan.vocab}&max_sessions={plan.max_sessions}&max_session_tokens={MANY_TOKENS}"
    spec = plan.engine if plan.model else f"{plan.engine}{'&' if '?' in plan.engine else '?'}{options}"
    cluster = stack.enter_context(shmsched.launch(spec, max_decode_sequences=plan.batch))

    def open_client(index: int) -> AbstractContextManager[Rounds]:
        if plan.way is Way.ASYNCIO:
            return rounds_in_loop(partial(_open_in_loop, cluster, plan), plan)
        client = shmsched.Client(socket=cluster.socket)
        if plan.way is Way.STREAM:
            return nullcontext(_streaming(client, plan, index))
        if plan.way is Way.STORM and index == 0:
            prompts = [LongPrompt(client.open_session(), plan) for _ in range(STREAMING)]
            return nullcontext(over(prompts, plan, _stream_prompts))
        return nullcontext(rounds([client.open_session() for _ in range(plan.sessions)], plan))

    crew.fork(open_client)
    crew.knows("scheduler", cluster.pid)
    crew.knows("engine", cluster.status()["engines"][0]["pid"])
    return str(cluster.socket)


async def _open_in_loop(cluster: shmsched.Cluster, plan: Plan, stack: AsyncExitStack) -> list[shmsched.AsyncSession]:
    client = await stack.enter_async_context(shmsched.AsyncClient(socket=cluster.socket))
    return [await client.open_session() for _ in range(plan.sessions)]


def _streaming(client: shmsched.Client, plan: Plan, index: int) -> Rounds:
    """In new sessions each round, opened before it: of those whose streams a round's end cancels, nobody knows the hash."""
    further = MOST if plan.model else FURTHER

    def opened() -> Sequence[Cursor]:
        sessions = [client.open_session() for _ in range(plan.sessions)]
        if not plan.model:
            return cursors_of(sessions, plan)
        return [ModelCursor(s, plan, index * plan.sessions + i) for i, s in enumerate(sessions)]

    cursors = opened()

    def run(when: Round) -> Tally:
        nonlocal cursors
        tally = over(cursors, plan, lambda cursors, watch: drive_streams(cursors, watch, further))(when)
        for cursor in cursors:
            cursor.session.close()
        cursors = opened()
        return tally

    return run


class ModelCursor(Cursor):
    """A session of a real model, whose tokens nobody foretells: wrong are those outside its vocabulary."""

    def __init__(self, session: shmsched.Session, plan: Plan, number: int) -> None:
        super().__init__(session, plan)
        self._prompt = prompt(number)

    def stream(self, further: int) -> Any:
        return self.session.stream(self._prompt, further=further)

    def check_streamed(self, token: int) -> None:
        self.wrong += not 0 <= token < self.session.vocab_size


def _stream_prompts(prompts: Sequence[Cursor], watch: Watch) -> None:
    """Each begins anew when it is answered."""
    for one in prompts:
        one.submit()
    while watch.goes_on():
        left_s = max(0.0, watch.end - time.monotonic())
        done = wait([one.future for one in prompts], left_s, FIRST_COMPLETED).done
        for one in prompts:
            if one.future in done:
                one.take()
                one.submit()
    for one in prompts:
        one.take()


class LongPrompt(Cursor):
    """A session whose every step is all of a long prompt."""

    def __init__(self, session: shmsched.Session, plan: Plan) -> None:
        super().__init__(session, plan)
        self._expected = answer(advance(0, LONG_PROMPT.tolist()), plan.vocab)

    def submit(self) -> None:
        self.future = self.session.submit(LONG_PROMPT, position=0)

    def check(self, answer: Any) -> None:
        self.wrong += answer.tokens[0] != self._expected

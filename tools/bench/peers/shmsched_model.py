"""shmsched with the ``llama_cpp`` engine: each client decodes its sessions greedily, or has the scheduler do it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import shmsched
from shmsched.tools.bench.crew import Crew
from shmsched.tools.bench.load import ANSWER_S, Rounds
from shmsched.tools.bench.model import prompt
from shmsched.tools.bench.plan import Plan, Round, Tally

MOST = 8_000
"""Tokens of a generation: more than a round has time for, and within the engine's context."""


def start(plan: Plan, crew: Crew, stack: ExitStack) -> str:
    # The bare loop computes no log-probabilities either.
    spec = f"llama_cpp:{plan.model}?threads={plan.threads}&max_sessions={plan.clients * plan.sessions}&logprobs=false"
    cluster = stack.enter_context(shmsched.launch(spec, max_decode_sequences=plan.batch))

    @contextmanager
    def open_client(index: int) -> Iterator[Rounds]:
        with shmsched.Client(socket=cluster.socket) as client:
            first = index * plan.sessions
            if plan.streamed:
                yield lambda when: _generate(client, plan.sessions, first, when)
            else:
                sessions = [client.open_session() for _ in range(plan.sessions)]
                yield lambda when: _decode(sessions, first, when)

    crew.fork(open_client)
    return str(cluster.socket)


def _decode(sessions: list[shmsched.Session], first: int, when: Round) -> Tally:
    """Tokens cannot be foretold here; ``wrong`` are those outside the vocabulary."""
    vocab = sessions[0].vocab_size
    futures = [session.submit(prompt(first + i), position=0) for i, session in enumerate(sessions)]
    steps = wrong = 0
    began = 0.0
    while (now := time.monotonic()) < when.end or not began:
        if not began and now >= when.start:
            began, steps = now, 0
        for i, session in enumerate(sessions):
            token = int(futures[i].result(ANSWER_S).tokens[0])
            wrong += not 0 <= token < vocab
            futures[i] = session.submit([token])
        steps += len(sessions)
    for future in futures:
        future.result(ANSWER_S)
    return Tally(steps=steps, seconds=now - began, wrong=wrong, p50_us=0.0)


def _generate(client: shmsched.Client, n: int, first: int, when: Round) -> Tally:
    """The same with generations, in new sessions each round."""
    with ExitStack() as stack:
        sessions = [stack.enter_context(client.open_session()) for _ in range(n)]
        vocab = sessions[0].vocab_size
        streams = [session.stream(prompt(first + i), further=MOST) for i, session in enumerate(sessions)]
        steps = wrong = 0
        began = 0.0
        while (now := time.monotonic()) < when.end or not began:
            if not began and now >= when.start:
                began, steps = now, 0
            for stream in streams:
                wrong += not 0 <= stream.next(ANSWER_S).token < vocab
            steps += n
        for stream in streams:
            stream.cancel()
        return Tally(steps=steps, seconds=now - began, wrong=wrong, p50_us=0.0)

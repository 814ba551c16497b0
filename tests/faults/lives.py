"""What clients do from their connection to their end, as programs of their own; and an engine that dies where it is told."""

from __future__ import annotations

import os
from pathlib import Path

from shmsched.workers.echo import Echo

LIFE = """
import shmsched, sys
client = shmsched.Client(socket=sys.argv[1], arena_bytes=1 << 20)
session = client.open_session()
futures = [session.submit([token]) for token in range(20)]
futures[-1].result(30)
raw = [session.submit([token], sampling=None) for token in range(3)]
held = [future.result(30).logits for future in raw]
stream = session.stream([5], further=100_000)
for _ in range(5):
    stream.next(30)
stream.cancel()
fork = session.fork(upto=10)
fork.submit([1]).result(30)
fork.close()
session.close()
"""
ASYNC_LIFE = """
import asyncio, shmsched, sys

async def decode(session):
    for token in range(20):
        await session.submit([token])

async def live():
    async with shmsched.AsyncClient(socket=sys.argv[1], arena_bytes=1 << 20) as client:
        sessions = [await client.open_session() for _ in range(4)]
        await asyncio.gather(*(decode(session) for session in sessions))
        held = await sessions[0].submit([1], sampling=None)
        stream = await sessions[1].stream([5], further=100_000)
        for _ in range(5):
            await stream.next()
        stream.cancel()
        fork = await sessions[2].fork(upto=10)
        await fork.close()

asyncio.run(live())
"""


class Doomed(Echo):
    """Echo whose ``incarnation`` dies at the point ``die_at``. ``directory`` counts the incarnations."""

    def __init__(self, directory: str, die_at: str, *, incarnation: int = 1, vocab: int = 1000) -> None:
        super().__init__(vocab=vocab)
        # Not at the top: this module is also the tests', and they are not to be armed.
        from shmsched import death_points

        with (Path(directory) / "incarnations").open("a") as file:
            print(os.getpid(), file=file)
        if len((Path(directory) / "incarnations").read_text().splitlines()) == incarnation:
            death_points.arm(die_at)

"""What clients do from their connection to their end, as programs of their own."""

from __future__ import annotations

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

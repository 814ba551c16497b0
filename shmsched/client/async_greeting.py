"""A daemon's greeting of a new client, for those who await it."""

from __future__ import annotations

import asyncio

from shmsched.client.state import HANDSHAKE_S, ClientState, Greeting
from shmsched.errors import SchedulerUnreachable
from shmsched.wire.link import Link


async def greeted(link: Link, where: str) -> ClientState:
    """What the daemon at ``where`` says to a new client. Raises SchedulerUnreachable, and what it says where it refuses the client."""
    greeting, loop = Greeting(link), asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(link.fileno(), readable.set)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            while True:
                await readable.wait()
                readable.clear()
                arrived = link.receive_ready()
                if arrived is None:
                    raise SchedulerUnreachable(f"the daemon at {where} closed the connection during the greeting")
                state = greeting.hear(arrived)
                if state is not None:
                    return state
    except TimeoutError:
        raise SchedulerUnreachable(f"the daemon at {where} did not greet within {HANDSHAKE_S:g} s") from None
    finally:
        loop.remove_reader(link.fileno())

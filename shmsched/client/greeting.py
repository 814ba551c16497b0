"""A daemon's greeting of a new client, for those who wait for it in their thread."""

from __future__ import annotations

import time

from shmsched.client.state import HANDSHAKE_S, ClientState, Greeting
from shmsched.errors import SchedulerUnreachable
from shmsched.wire.link import Link


def shake_hands(link: Link, where: str) -> ClientState:
    """Receive what the daemon says to a new client."""
    greeting = Greeting(link)
    deadline = time.monotonic() + HANDSHAKE_S
    late = False
    while not late:
        # What has arrived counts, however late we look.
        late = (left := deadline - time.monotonic()) <= 0
        arrived = link.receive(max(0.0, left))
        if arrived is None:
            raise SchedulerUnreachable(f"the daemon at {where} closed the connection during the greeting")
        state = greeting.hear(arrived)
        if state is not None:
            return state
    raise SchedulerUnreachable(f"the daemon at {where} did not greet within {HANDSHAKE_S:g} s")

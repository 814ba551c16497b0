"""Reading a generation to its end."""

from __future__ import annotations

from shmsched.client.futures import WaitingStream

DEADLINE = 30.0


def drain(stream: WaitingStream) -> list[int]:
    """All its tokens."""
    tokens = []
    while not stream.last:
        tokens.append(stream.next(DEADLINE).token)
    return tokens

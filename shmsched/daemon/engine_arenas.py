"""Which clients' arenas an engine has, so that it can write their raw logits."""

from __future__ import annotations

from shmsched.daemon.client_link import ClientLink
from shmsched.dataplane.session import Step
from shmsched.errors import SystemLimit
from shmsched.wire import frames
from shmsched.wire.peer import Peer


class EngineArenas:
    """The arenas that one engine was given. One that it cannot have costs its own client a step, and nobody the engine."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._given: set[ClientLink] = set()
        self._again: set[ClientLink] = set()
        """Those that it could not map the last time."""
        self._not_passed: dict[ClientLink, str] = {}
        """Those that we could not pass on the last time, and why."""

    def give(self, steps: list[Step]) -> None:
        """The engine gets the arena of each client that a step wants raw logits for, before the first batch that names it."""
        for step in steps:
            client = step.session.client
            arena = client.arena
            if not step.raw_rows or arena is None or (client in self._given and client not in self._again):
                continue
            self._given.add(client)
            self._again.discard(client)
            self._not_passed.pop(client, None)
            try:
                self._peer.send(frames.AttachArena(client.number, arena.size), arena.fd)
            except SystemLimit as e:
                self._not_passed[client] = str(e)
                self._peer.send(frames.AttachArena(client.number, 0))

    def lacks(self, client: ClientLink, message: str) -> str:
        """The engine says why it does not have this one. The client's next raw step tries again. Returns the reason."""
        if client in self._given:
            self._again.add(client)
        return self._not_passed.get(client, message)

    def forget(self, client: ClientLink) -> bool:
        """The client is gone. Whether the engine has been told of its arena."""
        had = client in self._given
        self._given.discard(client)
        self._again.discard(client)
        self._not_passed.pop(client, None)
        return had

    def clear(self) -> None:
        self._given.clear()
        self._again.clear()
        self._not_passed.clear()

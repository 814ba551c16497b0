"""What happens when more is submitted, by all clients together, than may be queued."""

from __future__ import annotations

from collections.abc import Callable

from shmsched.daemon.client_link import ClientLink
from shmsched.daemon.connections import Connection, Connections
from shmsched.daemon.loop import contained


class Overload:
    """While too much is queued, a client that has more than its share of it is not read until a quarter has gone.

    What it submits meanwhile waits in its ring and socket, within its own limits; then its ``submit`` waits, or raises Full.
    What is queued goes on, its answers are delivered, and its end is seen. A client's share is what each may have if all
    have as much: so one that floods makes the others wait in the engines' queues at most, and is itself never shut out.
    """

    def __init__(self, connections: Connections, most: int, queued: Callable[[], int]) -> None:
        """``queued``: how many steps are queued of all clients together."""
        self._connections = connections
        self._most = most
        self._queued = queued
        self.paused: dict[Connection, ClientLink] = {}
        """Those that are not being read."""

    def __len__(self) -> int:
        """How many clients are not being read."""
        return len(self.paused)

    def has_paused(self, link: ClientLink) -> bool:
        return link in self.paused.values()

    def submitted(self, connection: Connection, link: ClientLink, clients: int) -> None:
        """One of ``clients`` has submitted."""
        if link.outstanding * clients < self._most or self._queued() < self._most:
            return
        if not connection.paused and connection.open:
            self._connections.pause(connection)
            self.paused[connection] = link

    def gone(self, connection: Connection) -> None:
        """The client has left."""
        self.paused.pop(connection, None)

    def relieve(self, clients: int) -> None:
        """Read those again for whom there is room."""
        enough, queued = self._most * 3 // 4, self._queued()
        for connection, link in list(self.paused.items()):
            if queued <= enough or link.outstanding * clients <= enough:
                del self.paused[connection]
                with contained():
                    self._connections.resume(connection)

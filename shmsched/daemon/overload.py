"""What happens when more is submitted, by all clients together, than may be queued."""

from __future__ import annotations

from shmsched.daemon.connections import Connection, Connections


class Overload:
    """Clients that submit while too much is queued are not read until a quarter of it has gone.

    What they submit meanwhile waits in their rings and sockets, within each client's own limits; then their ``submit`` waits,
    or raises Full. What is queued goes on, its answers are delivered, and a client's end is seen.
    """

    def __init__(self, connections: Connections, most: int) -> None:
        self._connections = connections
        self._most = most
        self._paused: list[Connection] = []

    def __len__(self) -> int:
        """How many clients are not being read."""
        return len(self._paused)

    def submitted(self, connection: Connection, queued: int) -> None:
        """A client has submitted, and now ``queued`` steps are queued."""
        if queued >= self._most and not connection.paused and connection.open:
            self._connections.pause(connection)
            self._paused.append(connection)

    def relieve(self, queued: int) -> None:
        """Read the clients again if there is room."""
        if self._paused and queued <= self._most * 3 // 4:
            paused, self._paused = self._paused, []
            for connection in paused:
                self._connections.resume(connection)

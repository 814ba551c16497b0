"""How much shared memory the daemon has handed out, and the most that it will."""

from __future__ import annotations

from shmsched.errors import SharedMemoryError


class MemoryBudget:
    """A total over all segments. /dev/shm is memory: without a limit here, clients' arenas could take the machine's."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def reserve(self, n_bytes: int, what: str) -> None:
        """Raises SharedMemoryError with the sizes."""
        if self.used + n_bytes > self.limit:
            raise SharedMemoryError(
                f"{what} needs {n_bytes:,} bytes of shared memory; {self.used:,} of the daemon's {self.limit:,} are in use"
            )
        self.used += n_bytes

    def release(self, n_bytes: int) -> None:
        self.used -= n_bytes

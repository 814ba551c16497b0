"""What an engine has started and its keeper could not end, because somebody killed the keeper itself."""

from __future__ import annotations

import os
import secrets
import signal

_VARIABLE = "SHMSCHED_ENGINE"


class Mark:
    """In the environment of one engine's process, and so of what that starts. It is random: whoever has it is of that engine."""

    def __init__(self) -> None:
        self.environment = {_VARIABLE: secrets.token_hex(16)}
        self._wanted = f"{_VARIABLE}={self.environment[_VARIABLE]}".encode()

    def kill_all(self) -> None:
        for name in filter(str.isdecimal, os.listdir("/proc")):
            if not self._is_on(name):
                continue
            try:
                pidfd = os.pidfd_open(int(name))
            except OSError:
                continue
            try:
                # The number may have become another process's before it was opened; from here on it cannot.
                if self._is_on(name):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except OSError:
                pass
            finally:
                os.close(pidfd)

    def _is_on(self, pid: str) -> bool:
        try:
            with open(f"/proc/{pid}/environ", "rb") as environ:
                return self._wanted in environ.read().split(b"\0")
        except OSError:
            # It has ended, or belongs to another user.
            return False

"""How a process ended, in words."""

from __future__ import annotations

import signal


def how_it_ended(status: int, *, by_us: bool) -> str:
    """``status``: as ``Popen.returncode``. ``by_us``: it was killed on purpose."""
    if status >= 0:
        return f"exit status {status}"
    if status != -signal.SIGKILL:
        return f"killed by {_name(-status)}"
    return "killed by the scheduler" if by_us else "killed by SIGKILL, perhaps because memory ran out"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""``shmsched stop``."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shmsched.cli.exits import Failed
from shmsched.cli.options import SECONDS, socket_option
from shmsched.saying import counted, say

if TYPE_CHECKING:
    from shmsched.client.control import Control

GRACE_S = 15.0
"""What a daemon may take to let its engines end and say its last words, after its sessions are over."""


@click.command("stop")
@socket_option
@click.option(
    "--drain-timeout", type=SECONDS, metavar="S", help="How long open sessions may go on.  [default: the daemon's own]"
)
@click.option("--now", is_flag=True, help="End open sessions at once.")
def command(socket: Path | None, drain_timeout: float | None, now: bool) -> None:
    """Stop the daemon, and wait until it has ended.

    It takes no new sessions, and ends when the open ones have closed or the drain time-out has passed. Stopping a daemon
    that is stopping already ends it at once. Exit status 3: there is none, or the socket's path is wrong.
    """
    if now and drain_timeout is not None:
        raise click.UsageError("--now leaves no time to drain; give it without --drain-timeout.")
    from shmsched.client.control import Control
    from shmsched.wire.credentials import name_of

    with Control(socket) as control:
        pid = control.daemon_pid
        pidfd = _pidfd(pid)
        try:
            status = control.status()
            sessions = sum(client["sessions"] for client in status["clients"])
            again = status["state"] == "stopping"
            drain = control.stop(drain_s=0.0 if now else drain_timeout)
            if again:
                drain = 0.0
            say(
                f"stopping the daemon ({name_of(pid)}) at {status['socket']}: {_what_happens(sessions, drain)}",
                sys.stdout,
            )
            _wait_for_end(control, pidfd, pid, drain + GRACE_S)
        finally:
            if pidfd >= 0:
                os.close(pidfd)
    say("stopped", sys.stdout)


def _what_happens(sessions: int, drain: float) -> str:
    if not sessions:
        return "no session is open"
    what = counted(sessions, "open session")
    return f"{what} may go on for up to {drain:g} s" if drain else f"{what} ended now"


def _pidfd(pid: int) -> int:
    """-1 where there is none to be had: the kernel gives 0 as the pid of a process in another PID namespace."""
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except ProcessLookupError:
        raise Failed(f"the daemon (pid {pid}) has just ended") from None
    except OSError:
        return -1


def _wait_for_end(control: Control, pidfd: int, pid: int, seconds: float) -> None:
    if pidfd < 0:
        # Closing this connection is among the last things that it does.
        if not control.wait_closed(seconds):
            raise Failed(f"the daemon still runs after {seconds:g} s; kill it where its pid is known")
        return
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(seconds * 1000):
        raise Failed(f"the daemon (pid {pid}) still runs after {seconds:g} s; `kill -9 {pid}` ends it")

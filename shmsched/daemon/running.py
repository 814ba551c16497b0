"""A daemon's process, from its configuration to its exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shmsched.daemon.config import DaemonConfig, EngineConfig
from shmsched.daemon.server import Daemon
from shmsched.errors import ShmschedError
from shmsched.saying import say
from shmsched.scheduling.settings import checked
from shmsched.surroundings import speak_to_nobody_in_particular


def run(config: DaemonConfig) -> int:
    """Run a daemon in the foreground. Returns the exit status."""
    # The scheduler waits for no one, and for no one who reads its log.
    speak_to_nobody_in_particular(0.0)
    try:
        return Daemon(config).run()
    except ShmschedError as e:
        say(f"shmsched: {' '.join(str(e).split())}")
        return 1


def run_launched() -> int:
    """Run the daemon that standard input describes. Returns the exit status."""
    described = sys.stdin.buffer.read()
    if not described:
        return 0  # the launcher has ended
    settings = json.loads(described)
    engines = tuple(EngineConfig(spec=e["spec"], copies=e["copies"]) for e in settings.pop("engines"))
    socket, launcher = Path(settings.pop("socket")), settings.pop("launcher_pid", 0)
    params, rest = checked(settings)
    return run(DaemonConfig(socket=socket, engines=engines, params=params, launcher_pid=launcher, **rest))

"""``python -m shmsched.daemon``: what ``launch`` spawns, with its configuration on standard input. People use ``shmsched up``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shmsched.daemon.config import DaemonConfig, EngineConfig
from shmsched.daemon.server import Daemon
from shmsched.errors import ShmschedError
from shmsched.scheduling import SchedulerParams


def run(config: DaemonConfig) -> int:
    """Run a daemon in the foreground. Returns the exit status."""
    try:
        return Daemon(config).run()
    except ShmschedError as e:
        print(f"shmsched: {e}", file=sys.stderr)
        return 1


def main() -> int:
    settings = json.load(sys.stdin)
    engines = tuple(EngineConfig(spec=e["spec"], copies=e["copies"]) for e in settings.pop("engines"))
    params = SchedulerParams(**settings.pop("params"))
    socket = Path(settings.pop("socket"))
    return run(DaemonConfig(socket=socket, engines=engines, params=params, **settings))


if __name__ == "__main__":
    sys.exit(main())

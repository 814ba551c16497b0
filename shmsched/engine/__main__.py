"""``python -m shmsched.engine SPEC --socket PATH``: what the daemon spawns. ``shmsched engine`` is the same for people."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys

from shmsched.engine.contract import Engine
from shmsched.engine.host import check_complete, serve
from shmsched.engine.spec import EngineSpec
from shmsched.errors import EngineStartError, SchedulerDied, SchedulerUnreachable, ShmschedError
from shmsched.wire.frames import Role, StartFailed
from shmsched.wire.link import Link
from shmsched.wire.listener import default_socket

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def run(spec: str, socket: str | None, *, wait: float = 0.0, parent: int = 0) -> int:
    """Host the engine until the scheduler ends. Returns the exit status.

    ``parent``: die with the process that has this pid, which must be the parent (the daemon); 0 for one's own life.
    """
    if parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return 1
        # An interrupt from the terminal is the daemon's to handle: it lets this engine finish.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(_construct(spec, socket), socket, spec=spec, wait=wait)
    except SchedulerDied:
        return 0
    except KeyboardInterrupt:
        return 130
    except ShmschedError as e:
        if parent and isinstance(e, EngineStartError):
            # The daemon that spawned it was told, and says so: once is enough.
            return 1
        print(f"shmsched engine {spec} (pid {os.getpid()}): {' '.join(str(e).split())}", file=sys.stderr, flush=True)
        return 1
    return 0


def _construct(spec: str, socket: str | None) -> Engine:
    """The engine, not started. What goes wrong is told to the daemon too, for whoever waits for this engine."""
    try:
        engine = EngineSpec.parse(spec).load()()
        check_complete(engine)
        return engine
    except Exception as e:
        message = str(e) if isinstance(e, ShmschedError) else f"{type(e).__name__}: {e}"
        try:
            link = Link.connect(socket or default_socket(), Role.ENGINE)
            link.send(StartFailed(message))
            link.close()
        except ShmschedError as nobody:
            raise SchedulerUnreachable(f"{message} ({nobody})") from e
        if isinstance(e, ShmschedError | OSError | ImportError):
            # A file or a package that is not there is no fault of the engine's code, whose trace would say nothing more.
            raise EngineStartError(message) from e
        raise


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shmsched.engine")
    parser.add_argument("spec")
    parser.add_argument("--socket")
    parser.add_argument("--parent", type=int, default=0)
    args = parser.parse_args()
    return run(args.spec, args.socket, parent=args.parent)


if __name__ == "__main__":
    sys.exit(main())

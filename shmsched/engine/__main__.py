"""``python -m shmsched.engine SPEC --socket PATH``: what the daemon spawns. ``shmsched engine`` is the same for people."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys

from shmsched.engine.contract import Engine, check_complete
from shmsched.engine.host import serve
from shmsched.engine.spec import EngineImportError, EngineSpec
from shmsched.engine.stop_requests import INTERRUPTS, StopRequested, StopRequests
from shmsched.engine.traces import in_one_line, say_own
from shmsched.errors import EngineStartError, SchedulerDied, ShmschedError
from shmsched.limits import is_shortage
from shmsched.saying import say
from shmsched.surroundings import settle_in, speak_to_nobody_in_particular
from shmsched.wire.frames import Role, StartFailed
from shmsched.wire.link import Link
from shmsched.wire.socket_path import default_socket

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
LOG_PATIENCE_S = 1.0
"""How long what an engine prints waits for a log that is read slowly; longer than this its steps do not wait."""


def run(spec: str, socket: str | None, *, wait: float = 0.0, parent: int = 0) -> int:
    """Host the engine until the scheduler ends. Returns the exit status. Without a parent, raises ShmschedError.

    SIGTERM, a hang-up and, without a parent, Ctrl-C end it after the batch in hand; while it starts, or a second time, at once.

    ``parent``: die with the process that has this pid, which must be the parent (the daemon); 0 for one's own life.
    """
    if parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return 1
    speak_to_nobody_in_particular(LOG_PATIENCE_S)
    requests = StopRequests()
    try:
        # An interrupt from the terminal is the daemon's to handle: it lets this engine finish.
        requests.heed(ignored=(signal.SIGINT,) if parent else ())
        serve(_construct(spec, socket), socket, spec=spec, wait=wait, requests=requests)
    except SchedulerDied:
        return 0
    except StopRequested:
        pass
    except ShmschedError as e:
        if parent and isinstance(e, EngineStartError):
            # The daemon that spawned it was told, and says so: once is enough.
            return os.EX_TEMPFAIL if is_shortage(e) else 1
        if not parent:
            raise
        print(f"shmsched engine {spec} (pid {os.getpid()}): {' '.join(str(e).split())}", file=sys.stderr, flush=True)
        return os.EX_TEMPFAIL if is_shortage(e) else 1
    return 130 if requests.number == signal.SIGINT else 0


def _construct(spec: str, socket: str | None) -> Engine:
    """The engine, not started. What goes wrong is told to the daemon too, for whoever waits for this engine."""
    try:
        engine = EngineSpec.parse(spec).load()()
        check_complete(engine)
        return engine
    except INTERRUPTS:
        raise
    except BaseException as e:
        message = str(e) if isinstance(e, ShmschedError) else in_one_line(e)
        try:
            link = Link.connect(socket or default_socket(), Role.ENGINE)
            link.send(StartFailed(message))
            link.close()
        except ShmschedError as nobody:
            raise EngineStartError(f"{message} ({nobody})") from e
        at_fault = e.__cause__ if isinstance(e, EngineImportError) else e
        # A file or a package that is not there is no fault of the engine's code, whose trace would say nothing more.
        if at_fault is not None and not isinstance(at_fault, ShmschedError | OSError | ImportError):
            say_own(f"shmsched engine {spec} (pid {os.getpid()}) did not start:", at_fault)
        raise EngineStartError(message) from e


def main() -> int:
    settle_in(hold=True)
    parser = argparse.ArgumentParser(prog="python -m shmsched.engine")
    parser.add_argument("spec")
    parser.add_argument("--socket")
    parser.add_argument("--parent", type=int, default=0)
    args = parser.parse_args()
    try:
        return run(args.spec, args.socket, parent=args.parent)
    except ShmschedError as e:
        say(f"shmsched engine {args.spec}: {' '.join(str(e).split())}")
        return 1


if __name__ == "__main__":
    sys.exit(main())

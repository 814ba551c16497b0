"""What a restart of an engine leaves in the daemon: nothing, however long a start may take."""

from __future__ import annotations

import gc
import subprocess
import time
from pathlib import Path

import pytest

from shmsched.daemon.config import DaemonConfig, EngineConfig
from shmsched.daemon.loop import EventLoop
from shmsched.daemon.supervisor import Supervisor, Worker

from processes.leftovers import DEADLINE_S

pytestmark = pytest.mark.usefixtures("no_leftovers")
RESTARTS = 3


def test_nothing_is_kept_of_an_engine_that_has_ended(tmp_path: Path) -> None:
    """A chaos run restarts an engine every second or two: the wait for its start once kept each process's object for ten minutes."""
    program = tmp_path / "engine"
    program.write_text("#!/bin/sh\nsleep 0.1\n")
    program.chmod(0o700)
    loop = EventLoop()
    config = DaemonConfig(
        socket=tmp_path / "s", engines=(EngineConfig(spec="none", python=str(program)),), start_timeout_s=600.0
    )
    died: list[Worker] = []
    supervisor = Supervisor(config, loop, died.append, lambda message: None)
    (worker,) = supervisor.workers
    gc.collect()
    before = _processes()
    supervisor.start()
    deadline = time.monotonic() + DEADLINE_S
    while len(died) < RESTARTS and time.monotonic() < deadline:
        loop.call_at(time.monotonic() + 0.05, lambda: None)
        loop.turn()
        if worker.process is not None and not worker.ready:
            supervisor.is_ready(worker)
    assert len(died) == RESTARTS, f"{len(died)} of {RESTARTS} ends were seen within {DEADLINE_S:g} s"
    supervisor.end(0.0, loop.stop)
    loop.run()
    gc.collect()
    # The thread that spawns them has the last one in hand until the next.
    assert _processes() - before <= 1
    loop.close()


def _processes() -> int:
    return sum(isinstance(each, subprocess.Popen) for each in gc.get_objects())

"""A contestant, as the bench sees it: a process that runs rounds."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from shmsched.tools.bench.crew import SLACK_S, START_S, BenchFault
from shmsched.tools.bench.plan import Plan, Round, RoundResult
from shmsched.tools.bench.processes import per_step, spent

END_S = 15.0
LEAD_S = 0.05


class Contestant:
    """Starts with ``with``, and ends with it, all of its processes too."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.socket: Path | None = None
        """Of shmsched's daemon, for its status."""
        self._processes: dict[str, list[int]] = {}
        # A process group of its own keeps a terminal's Ctrl-C away, and is what is ended at last.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shmsched.tools.bench.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._order(plan.to_json())
            ready = self._hear(2 * START_S)
            self.socket = Path(ready["socket"]) if ready["socket"] else None
            self._processes = ready["processes"]
        except BaseException:
            self.close()
            raise

    def run(self, warm_up: float, seconds: float) -> RoundResult:
        """One round. Raises BenchFault if an answer was wrong."""
        start = time.monotonic() + LEAD_S + warm_up
        when = Round(start=start, end=start + seconds)
        self._order({"start": when.start, "end": when.end})
        before, after = self._spent(when.start), self._spent(when.end)
        result = RoundResult(**self._hear(warm_up + seconds + 2 * SLACK_S))
        if result.wrong:
            raise BenchFault(f"{self.plan.transport.value}: {result.wrong} answers were not echo's")
        return replace(result, cpu_us=per_step(before, after, result.steps_per_s * seconds))

    def _spent(self, when: float) -> dict[str, float]:
        """What its processes have taken of the cores by then."""
        time.sleep(max(0.0, when - time.monotonic()))
        return spent(self._processes)

    def close(self) -> None:
        """End it, and all that it started. Idempotent."""
        process = self._process
        if process.returncode is not None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass
        _wait_unreaped(process.pid, END_S)
        # As long as it is not reaped, its number is its group's and nobody else's.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _order(self, document: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(document).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # It is dead; the end of its output tells.
            pass

    def _hear(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        name = self.plan.transport.value
        if not poll.poll(seconds * 1000):
            raise BenchFault(f"{name} said nothing for {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise BenchFault(f"{name} ended early; what it said is on standard error")
        document: dict[str, Any] = json.loads(line)
        return document


def _wait_unreaped(pid: int, seconds: float) -> None:
    fd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(seconds * 1000)
    finally:
        os.close(fd)

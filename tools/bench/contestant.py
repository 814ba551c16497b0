"""A contestant, as the bench sees it: a process that runs rounds."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import shmsched.tools
from shmsched import Control
from shmsched.tools.bench.crew import SLACK_S, START_S, BenchFault, hear, tell
from shmsched.tools.bench.plan import Gauge, Plan, Round, RoundResult
from shmsched.tools.bench.processes import per_step, spent

END_S = 15.0
LEAD_S = 0.05
HOST = "from shmsched.tools.bench.crew import host; host()"
COUNTED = ("steps", "tokens", "batches")


class Contestant(ExitStack):
    """Starts with ``with``, and ends with it, all of its processes too."""

    def __init__(self, plan: Plan, beside: str | None = None) -> None:
        super().__init__()
        self.name = "beside" if beside else plan.transport.value
        self.socket: Path | None = None
        """Of shmsched's daemon."""
        self.processes: dict[str, list[int]] = {}
        """By what they are."""
        self._control: Control | None = None
        with ExitStack() as stack:
            self._line = stack.enter_context(_hosted(beside))
            tell(self._line, plan)
            socket, self.processes = hear(self._line, self.name, 2 * START_S)
            self.socket = socket and Path(socket)
            if plan.gauge in (Gauge.BUSY, Gauge.TOGETHER):
                self._control = stack.enter_context(Control(self.socket))
            self.push(stack.pop_all())

    def run(self, warm_up: float, seconds: float) -> RoundResult:
        """One round. Raises BenchFault if an answer was wrong."""
        start = time.monotonic() + LEAD_S + warm_up
        tell(self._line, Round(start, start + seconds))
        (began, cpu, engine), (ended, cpu_after, engine_after) = self._look(start), self._look(start + seconds)
        result: RoundResult = hear(self._line, self.name, 2 * SLACK_S)
        if result.wrong:
            raise BenchFault(f"{self.name}: {result.wrong} answers were not echo's")
        counted = {name: (engine_after[name] - engine[name]) / (ended - began) for name in engine}
        return replace(result, cpu_us=per_step(cpu, cpu_after, result.steps_per_s * seconds), engine=counted)

    def _look(self, when: float) -> tuple[float, dict[str, float], dict[str, float]]:
        """When that was, what its processes have taken of the cores by then, and what its engine has done."""
        time.sleep(max(0.0, when - time.monotonic()))
        engine = self._control.status()["engines"][0] if self._control else {}
        return time.monotonic(), spent(self.processes), {name: engine[name] for name in COUNTED if engine}


@contextmanager
def _hosted(beside: str | None) -> Iterator[Connection]:
    """A host of this environment, or of another's Python ``beside``, as env(1) takes it: that one runs this bench's code, over
    its own shmsched."""
    command = [sys.executable, "-P", "-c", HOST]
    if beside:
        tools = [str(Path(path).resolve()) for path in shmsched.tools.__path__]
        command = ["env", *shlex.split(beside), "-P", "-c", f"import shmsched.tools as t; t.__path__ = {tools}; {HOST}"]
    line, theirs = Pipe()
    # A process group of its own keeps a terminal's Ctrl-C away, and is what is ended at last.
    with subprocess.Popen(
        [*command, str(theirs.fileno())], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
    ) as process:
        theirs.close()
        try:
            yield line
        finally:
            line.close()
            _wait_unreaped(process.pid, END_S)
            # As long as it is not reaped, its number is its group's and nobody else's.
            os.killpg(process.pid, signal.SIGKILL)


def _wait_unreaped(pid: int, seconds: float) -> None:
    fd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(seconds * 1000)
    finally:
        os.close(fd)

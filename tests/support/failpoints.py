"""Processes that die at a point of the path: a Python program, or an engine that a daemon has started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from shmsched import failpoints
from shmsched.engine import BatchView
from shmsched.failpoints import VARIABLE, Name
from shmsched.workers.echo import Echo


class Moment(NamedTuple):
    """The ``n``-th time that a process comes to a point."""

    point: Name
    n: int = 1

    def __str__(self) -> str:
        return f"{self.point}:{self.n}"


@contextmanager
def armed(moment: Moment, *command: object) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that dies at the moment. It is killed in the end, if it still runs."""
    env = {**os.environ, VARIABLE: str(moment)}
    with subprocess.Popen([sys.executable, *map(str, command)], env=env, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


IN_FORWARD = "forward"
"""Not a point of ours: the engine has asked where a row of logits goes, and has written nothing into it."""


class Doomed(Echo):
    """Echo whose ``incarnation`` dies at the point ``die_at``, or in its first ``forward``. ``directory`` counts the incarnations."""

    def __init__(self, directory: str, die_at: str, *, incarnation: int = 1, vocab: int = 1000) -> None:
        super().__init__(vocab=vocab)
        with (Path(directory) / "incarnations").open("a") as file:
            print(os.getpid(), file=file)
        self._in_forward = False
        if len((Path(directory) / "incarnations").read_text().splitlines()) == incarnation:
            self._in_forward = die_at == IN_FORWARD
            if not self._in_forward:
                failpoints.arm(die_at)

    def forward(self, batch: BatchView) -> None:
        if self._in_forward and None in batch.sampling:
            batch.rows[0]
            os.kill(os.getpid(), 9)
        super().forward(batch)

"""``shmsched stress`` as a user runs it, with engines that do wrong if wanted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Run

DEADLINE_S = 120.0
ENGINES = '''
import os
import sys
import time

from shmsched.engine import BatchView
from shmsched.workers.echo import Echo


class Counting(Echo):
    batches = 0

    def forward(self, batch: BatchView) -> None:
        self.batches += 1
        super().forward(batch)


class Liar(Counting):
    """One token in some batches, one index of one row in others, is not echo's."""

    def forward(self, batch: BatchView) -> None:
        super().forward(batch)
        if self.batches % 20 == 0 and len(batch.outputs):
            if batch.sampling[0] is None:
                batch.rows[0][7] = 1.5
            else:
                batch.set_tokens(0, (3,), (0.0,))


class Dying(Counting):
    """Ends by itself now and then."""

    def forward(self, batch: BatchView) -> None:
        if self.batches == 100:
            os._exit(3)
        super().forward(batch)


class Hanging(Counting):
    def forward(self, batch: BatchView) -> None:
        if self.batches == 40:
            time.sleep(600)
        super().forward(batch)


class Leaking(Counting):
    """Keeps some memory of each batch."""

    def forward(self, batch: BatchView) -> None:
        self.kept = [*getattr(self, "kept", ()), b"x" * 20_000]
        super().forward(batch)


class Printing(Counting):
    """Answers well, and says so once in a way that nobody knows."""

    def forward(self, batch: BatchView) -> None:
        super().forward(batch)
        if self.batches == 40:
            print("Traceback (most recent call last):\\n  nowhere\\nOddError: of an engine's", file=sys.stderr, flush=True)


class Raising(Counting):
    def forward(self, batch: BatchView) -> None:
        super().forward(batch)
        if self.batches % 50 == 0:
            raise RuntimeError("told to")
'''


@pytest.fixture
def stress(tmp_path: Path) -> Callable[..., Run]:
    def stress(*arguments: str, while_it_runs: Callable[[int], None] | None = None) -> Run:
        path = tmp_path / "results.json"
        line = [sys.executable, "-m", "shmsched.tools.stress", "--clients", "2", "--seed", "11", "--json", str(path)]
        with subprocess.Popen(
            [*line, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        ) as process:
            if while_it_runs is not None:
                while_it_runs(process.pid)
            out, err = process.communicate(timeout=DEADLINE_S)
        results = json.loads(path.read_text()) if path.exists() else {}
        return Run(process.returncode, results, out, err)

    return stress


@pytest.fixture
def engines(tmp_path: Path) -> str:
    path = tmp_path / "engines.py"
    path.write_text(ENGINES)
    return path.name

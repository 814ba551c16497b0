"""An engine that writes down what it runs, and stops where it is told to until a file appears."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from shmsched.engine import BatchView
from shmsched.workers.echo import Echo

HOLD = 999
"""A batch with this token waits for the gate before it computes anything."""
GATE_S = 60.0


class Watched(Echo):
    """Echo that appends a line to ``DIRECTORY/log`` at the start of each batch and for each session that it closes.

    ``DIRECTORY/started`` holds the number of batches begun. The gate is ``DIRECTORY/gate``.
    """

    def __init__(self, directory: str, *, step_us: float = 0.0, vocab: int = 1000, max_sessions: int = 64) -> None:
        super().__init__(vocab=vocab, max_sessions=max_sessions, step_us=step_us)
        self._directory = Path(directory)
        self._log = os.open(self._directory / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._started = os.open(self._directory / "started", os.O_WRONLY | os.O_CREAT, 0o600)
        self._batches = 0

    def close_session(self, slot: int) -> None:
        super().close_session(slot)
        self._write({"closed": slot})

    def forward(self, batch: BatchView) -> None:
        self._batches += 1
        steps = [[slot, int(batch.positions[start]), length] for slot, start, length in batch.steps]
        self._write({"batch": self._batches, "steps": steps})
        os.pwrite(self._started, self._batches.to_bytes(8, "little"), 0)
        if HOLD in batch.tokens:
            deadline = time.monotonic() + GATE_S
            while not (self._directory / "gate").exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nobody opened the gate within {GATE_S:g} s")
                time.sleep(0.001)
        super().forward(batch)

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._log, json.dumps(line).encode() + b"\n")


class Record:
    """What a ``Watched`` engine wrote into ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.spec = f"{__file__}:Watched:{directory}"

    def open_gate(self) -> None:
        (self.directory / "gate").touch()

    def started(self) -> int:
        """How many batches have begun."""
        path = self.directory / "started"
        return int.from_bytes(path.read_bytes(), "little") if path.exists() else 0

    def batches(self) -> list[list[tuple[int, int, int]]]:
        """For each batch so far its rows: slot, position and length."""
        return [[tuple(step) for step in line["steps"]] for line in self._lines() if "batch" in line]

    def closed(self) -> list[int]:
        """The slots closed so far."""
        return [line["closed"] for line in self._lines() if "closed" in line]

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "log").read_text().splitlines()]

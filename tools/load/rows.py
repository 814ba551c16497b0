"""Raw rows of logits: what echo writes into them, and that nobody writes into those that are held."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from shmsched import LogitsBlock
from shmsched.tools.load.mirror import I64
from shmsched.workers.echo import PEAK

F32 = npt.NDArray[np.float32]
HELD_ROWS = 8


class RowCheck:
    """Compares raw rows with what echo writes."""

    def __init__(self, vocab: int) -> None:
        self._pattern: F32 = ((np.arange(vocab, dtype=np.int64) * 40503) & 0xFFFF).astype(np.float32)

    def fault(self, rows: F32, answers: I64, *, whole: bool) -> str | None:
        """What is not right with ``rows``, in words. ``whole``: compare every index, not the peak only."""
        if rows.dtype != np.float32 or rows.shape != (len(answers), len(self._pattern)):
            return f"rows are {rows.dtype} {rows.shape}, not float32 ({len(answers)}, {len(self._pattern)})"
        if rows.flags.writeable:
            return "rows are writable"
        for k, (row, answer) in enumerate(zip(rows, answers.tolist(), strict=True)):
            peak = int(row.argmax())
            if peak != answer or row[peak] != PEAK:
                return f"row {k} has its greatest value {row[peak]} at {peak}, not {PEAK} at {answer}"
            if whole:
                differing = np.flatnonzero(row != self._pattern)
                if differing.tolist() != [answer]:
                    return f"row {k} differs from the pattern at {differing[:4].tolist()}, not at {answer} only"
        return None


class HeldLeases:
    """Leases, or slices of them, that are kept while other steps run, and must not change meanwhile."""

    def __init__(self, check: RowCheck) -> None:
        self._check = check
        self._held: deque[tuple[LogitsBlock | F32, I64, int]] = deque()
        self._rows = 0
        self._now = 0

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, what: LogitsBlock | F32, answers: I64, turns: int) -> bool:
        """Keep it for so many calls of ``check_due``. False if enough is held already."""
        if self._rows + len(answers) > HELD_ROWS:
            return False
        self._rows += len(answers)
        self._held.append((what, answers, self._now + turns))
        return True

    def check_due(self) -> list[str]:
        """Check and give back what was held long enough. Returns what had changed."""
        self._now += 1
        return self._check_until(self._now)

    def check_all(self) -> list[str]:
        return self._check_until(None)

    def _check_until(self, turn: int | None) -> list[str]:
        faults = []
        while self._held and (turn is None or self._held[0][2] <= turn):
            what, answers, _ = self._held.popleft()
            self._rows -= len(answers)
            rows = what.data if isinstance(what, LogitsBlock) else what
            if fault := self._check.fault(rows, answers, whole=True):
                faults.append(f"rows changed while they were held: {fault}")
            if isinstance(what, LogitsBlock):
                what.release()
        return faults

"""From the steps of a batch to forward passes: one row for each session, its chunks side by side.

A batch may hold several chunks of one session, apart from each other. Chunks that continue one another become one row.
One that does not (it rewinds) has to wait until the rows before it have run, so it goes into a second pass.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shmsched.dataplane.layouts import StepEntry

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True)
class Row:
    """Consecutive steps of one session; ``steps`` are indices into the batch."""

    slot: int
    position: int
    steps: list[int] = field(default_factory=list)
    length: int = 0

    @property
    def end(self) -> int:
        return self.position + self.length


def passes(entries: list[StepEntry], left_out: Container[int] = ()) -> list[list[Row]]:
    """The rows of each forward pass, in the order in which sessions first appear. ``left_out``: steps that are not run."""
    plan: list[list[Row]] = []
    latest: dict[int, tuple[int, Row]] = {}
    for i, entry in enumerate(entries):
        if i in left_out:
            continue
        at, row = latest.get(entry.slot, (-1, None))
        if row is None or row.end != entry.position:
            at, row = at + 1, Row(entry.slot, entry.position)
            latest[entry.slot] = at, row
            if at == len(plan):
                plan.append([])
            plan[at].append(row)
        row.steps.append(i)
        row.length += entry.length
    return plan


def gather(rows: list[Row], entries: list[StepEntry], tokens: Int32s) -> tuple[Int32s, Int32s]:
    """The tokens and positions of these rows, flat. A view of ``tokens`` where the rows already lie in order."""
    order = [i for row in rows for i in row.steps]
    n = sum(row.length for row in rows)
    positions = np.arange(n, dtype=np.int32)
    start = 0
    for row in rows:
        positions[start : start + row.length] += row.position - start
        start += row.length
    first = entries[order[0]].start
    ends = [entries[i].start + entries[i].length for i in order]
    if all(entries[i].start == end for i, end in zip(order[1:], ends, strict=False)):
        return tokens[first : first + n], positions
    return np.concatenate([tokens[entries[i].start : end] for i, end in zip(order, ends, strict=True)]), positions


def wanted(rows: list[Row], entries: list[StepEntry]) -> tuple[list[int], list[int], list[int]]:
    """The outputs of a pass: their indices into its tokens; the step each belongs to; the row number within that step."""
    outputs: list[int] = []
    owners: list[int] = []
    within: list[int] = []
    start = 0
    for row in rows:
        for i in row.steps:
            length = entries[i].length
            n = entries[i].n_rows
            outputs.extend(range(start + length - n, start + length))
            owners.extend([i] * n)
            within.extend(range(n))
            start += length
    return outputs, owners, within

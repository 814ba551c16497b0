"""What a contestant's processes take of the cores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

Seconds = dict[str, float]
"""Of all processes of each role together."""


def spent(processes: Mapping[str, list[int]]) -> Seconds:
    """For how long all threads of each role's processes have run so far (proc_pid_schedstat(5)). Of one that has ended, nothing."""
    return {role: sum(map(_spent, pids)) for role, pids in processes.items()}


def per_step(before: Seconds, after: Seconds, n_steps: float) -> Seconds:
    """Microseconds of each step."""
    return {role: 1e6 * (after[role] - before[role]) / n_steps for role in after} if n_steps else {}


def told(cpu: Mapping[str, list[Seconds]]) -> str:
    """A step's way through all processes of each contestant, in words: the medians of its rounds."""
    return "CPU of a step, us: " + "; ".join(filter(None, map(_told, cpu, cpu.values())))


def _told(name: str, rounds: list[Seconds]) -> str:
    """Nothing where there is no process to look at."""
    medians = {role: median(r[role] for r in rounds) for role in (rounds[0] if rounds else ())}
    parts = ", ".join(f"{role} {us:.1f}" for role, us in medians.items())
    return f"{name} {sum(medians.values()):.1f} ({parts})" if medians else ""


def _spent(pid: int) -> float:
    return sum(_nanoseconds(Path(f"/proc/{pid}/task").glob("*/schedstat"))) / 1e9


def _nanoseconds(files: Iterable[Path]) -> Iterable[int]:
    for file in files:
        try:
            yield int(file.read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            pass  # that thread has just ended

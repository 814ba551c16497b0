"""Runs of ``shmsched stress`` that have ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    status: int
    results: dict[str, Any]
    out: str
    err: str


def assert_clean(run: Run) -> None:
    results = run.results
    assert run.status == 0, run.out + run.err
    assert [results[name] for name in ("wrong", "lost", "leaked", "failed")] == [0, 0, 0, 0]
    assert results["steps"] > 0
    assert results["seconds"] > 0
    assert results["steps_per_s"] > 0
    assert results["mean_batch"] >= 1
    latency = results["latency_us"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]
    assert_balanced(run)
    assert "steps/s" in run.out
    # Only the daemon's own messages: no traceback of a client, no complaint of a library.
    assert [line for line in run.err.splitlines() if not line.startswith("shmsched")] == []


def assert_balanced(run: Run) -> None:
    ledger = run.results["ledger"]
    assert set(ledger) == {"submitted", "queued", "in_flight", "completed", "failed", "cancelled"}
    assert ledger["submitted"] == sum(count for name, count in ledger.items() if name != "submitted")
    assert ledger["queued"] == ledger["in_flight"] == 0
    assert run.results["ledger_balanced"] is True

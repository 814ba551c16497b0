"""Recorded traces replay exactly. One trace a line; those of vacated_turn.jsonl are all of rule G7."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shmsched.scheduling import Scheduler, SchedulerParams
from shmsched.steps import Request

TRACES = {
    f"{name}-{i}": line
    for name in ("decode_first", "vacated_turn")
    for i, line in enumerate((Path(__file__).parent / f"{name}.jsonl").read_text().splitlines())
}


def replay(scheduler: Scheduler, op: str, args: list[Any]) -> list[Any]:
    """What came of the operation, in the trace's own form."""
    match op:
        case "submit":
            request_id, session_id, n_tokens = args[:3]
            future = scheduler.submit(Request(request_id, session_id, range(n_tokens)))
            return [request_id, session_id, n_tokens, "rejected" if future.done() else "queued"]
        case "get_work":
            batch = scheduler.get_work()
            return [[request.request_id for request in batch.requests], batch.n_tokens]
        case "complete":
            return [args[0], "completed" if scheduler.complete(args[0], [1]) else "ignored"]
        case "fail":
            return [args[0], "failed" if scheduler.fail(args[0], "why") else "ignored"]
        case "fail_all":
            return [scheduler.fail_all("why")]
        case "observe":
            return [scheduler.queued, scheduler.has_work, args[2], scheduler.pending(args[2])]
    raise AssertionError(op)


def test_there_are_65_traces() -> None:
    assert len(TRACES) == 65


@pytest.mark.parametrize("name", TRACES)
def test_trace_replays(name: str) -> None:
    trace = json.loads(TRACES[name])
    scheduler = Scheduler(SchedulerParams(trace["max_decode_sequences"], trace["max_prefill_chunk_size"]))
    for i, (op, *args) in enumerate(trace["ops"]):
        assert replay(scheduler, op, args) == args, f"operation {i}: {op}"
        assert scheduler.counts.balanced

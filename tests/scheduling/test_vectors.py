"""Recorded traces replay exactly (decode_first.jsonl: one trace a line)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shmsched.scheduling import Scheduler, SchedulerParams
from shmsched.steps import Request

TRACES = (Path(__file__).parent / "decode_first.jsonl").read_text().splitlines()


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


def test_there_are_60_traces() -> None:
    assert len(TRACES) == 60


@pytest.mark.parametrize("line", TRACES, ids=range(len(TRACES)))
def test_trace_replays(line: str) -> None:
    trace = json.loads(line)
    scheduler = Scheduler(SchedulerParams(trace["max_decode_sequences"], trace["max_prefill_chunk_size"]))
    for i, (op, *args) in enumerate(trace["ops"]):
        assert replay(scheduler, op, args) == args, f"operation {i}: {op}"
        assert scheduler.counts.balanced

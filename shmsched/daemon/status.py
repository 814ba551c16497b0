"""What ``status`` shows: everything that the daemon counts, as a JSON document."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

from shmsched.daemon.client_link import ClientLink
from shmsched.daemon.engine_link import EngineLink
from shmsched.daemon.holders import by_process
from shmsched.daemon.parts import Parts
from shmsched.daemon.supervisor import Worker
from shmsched.dataplane import BUILD
from shmsched.dataplane.session import Session
from shmsched.scheduling import SchedulerParams


def status_document(parts: Parts, batches: int) -> bytes:
    """``batches``: how many of each engine's last batches to include."""
    now = parts.loop.clock.now()
    counts = parts.core.ledger.counts()
    document = {
        "build": BUILD,
        "state": "stopping" if parts.stopping else "running",
        "pid": os.getpid(),
        "socket": str(parts.config.socket),
        "uptime_s": round(now - parts.started, 3),
        "limits": _limits(parts.config.params),
        "ledger": {**asdict(counts), "balanced": counts.balanced},
        "waiting_sessions": parts.placement.waiting,
        "waiting": [
            {"model": model, "pid": pid, "sessions": n}
            for model, counts in parts.placement.waiting_for().items()
            for pid, n in by_process([counts])
        ],
        "paused_clients": len(parts.overload),
        "max_queued_steps": parts.config.max_queued_steps,
        "max_clients": parts.config.max_clients,
        "shared_memory": {"used_bytes": parts.clients.budget.used, "limit_bytes": parts.clients.budget.limit},
        "clients": [_client(link, now, parts) for link in parts.clients.links.values()],
        "engines": [_engine(link, now, batches) for link in parts.engines.links.values()],
        "workers": [_worker(worker) for worker in parts.supervisor.workers],
    }
    return json.dumps(document).encode()


def _limits(params: SchedulerParams) -> dict[str, int]:
    return {
        "max_decode_sequences": params.max_decode_sequences,
        "max_prefill_chunk_size": params.max_prefill_chunk_size,
        "max_batch_size": params.max_batch_size,
    }


def _client(link: ClientLink, now: float, parts: Parts) -> dict[str, Any]:
    return {
        "client": link.number,
        "pid": link.peer.pid,
        "sessions": len(link.sessions),
        "outstanding": link.outstanding,
        "paused": parts.overload.has_paused(link),
        "arena_bytes": link.arena.size if link.arena else 0,
        "unsent_bytes": link.peer.outbound_bytes,
        "unsent_for_s": round(now - link.peer.behind_since, 6) if link.peer.behind_since else 0.0,
    }


def _engine(link: EngineLink, now: float, batches: int) -> dict[str, Any]:
    in_flight = None
    if link.batch is not None:
        in_flight = {
            "batch": link.batch.number,
            "steps": len(link.batch.steps),
            "sessions": [_session(step.session) for step in link.batch.steps],
            "for_s": round(now - link.batch.started, 6),
        }
    recent = list(link.record.recent)[-batches:] if batches else []
    return {
        "engine": link.number,
        "spec": link.offer.spec,
        "model": link.offer.model,
        "pid": link.peer.pid,
        "state": link.state.value,
        "vocab_size": link.offer.vocab_size,
        "limits": _limits(link.limits),
        "sessions": len(link.sessions),
        "max_sessions": link.offer.max_sessions,
        "held_by": [{"pid": pid, "sessions": n} for pid, n in by_process([link.holders])],
        "queued": len(link.queues),
        "batches": link.batches.given,
        "batches_ahead": link.batches.given_ahead,
        "steps": link.record.steps,
        "tokens": link.record.tokens,
        "busy_s": round(link.record.busy_s, 6),
        "mean_step_s": round(link.linger.mean_step_s, 6),
        "stale_answers": link.stale_answers,
        "in_flight": in_flight,
        "recent_batches": [summary._asdict() for summary in recent],
    }


def _session(session: Session) -> dict[str, int]:
    """By its client's number, ``session.session_id`` there."""
    return {"session": session.client_id, "client": session.client.number, "pid": session.client.peer.pid}


def _worker(worker: Worker) -> dict[str, Any]:
    return {
        "spec": worker.spec,
        "state": worker.state.value,
        "pid": (worker.pid or None) if worker.process else None,
        "restarts": worker.restarts,
        "last_exit": worker.last_exit,
        "reason": worker.reason,
    }

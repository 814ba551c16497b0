"""The status document as tables."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shmsched.saying import counted

_WIDTH_OF_A_LOG = 140
_MOST_NAMED = 8
_GOOD = {"ready", "attached", "running"}


def console() -> Console:
    """For text that others wrote: what looks like markup in a name is printed as it is."""
    width = None if sys.stdout.isatty() else _WIDTH_OF_A_LOG
    return Console(width=width, markup=False, highlight=False, emoji=False)


def tables(document: dict[str, Any]) -> RenderableType:
    return Group(
        _head(document),
        _ledger(document["ledger"]),
        _engines(document["engines"], document["limits"]),
        _workers(document["workers"]),
        _clients(document),
        _foot(document),
    )


def _head(document: dict[str, Any]) -> Text:
    return Text.assemble(
        ("shmsched ", "bold"),
        _state(document["state"]),
        f", {document['build']}, pid {document['pid']}, up {duration(document['uptime_s'])}, {document['socket']}",
        overflow="fold",
    )


def _ledger(ledger: dict[str, Any]) -> Table:
    table = _table("ledger", "submitted", "queued", "in flight", "completed", "failed", "cancelled")
    balance = Text("balanced", "green") if ledger["balanced"] else Text("NOT BALANCED", "bold red")
    names = ("submitted", "queued", "in_flight", "completed", "failed", "cancelled")
    table.add_row(balance, *(f"{ledger[name]:,}" for name in names))
    return table


def _engines(engines: list[dict[str, Any]], limits: dict[str, int]) -> RenderableType:
    if not engines:
        return Text("no engine is attached; start one with `shmsched engine SPEC`", "yellow")
    table = _table("engine", "pid", "state", "sessions", "queued", "in flight", "batches", "mean")
    for engine in engines:
        table.add_row(
            _name(engine, limits),
            str(engine["pid"] or "-"),
            _state(engine["state"]),
            f"{engine['sessions']}/{engine['max_sessions']}",
            str(engine["queued"]),
            _in_flight(engine["in_flight"]),
            f"{engine['batches']:,}",
            duration(engine["mean_step_s"]) if engine["batches"] else "-",
        )
    return table


def _name(engine: dict[str, Any], limits: dict[str, int]) -> Text:
    """The model; below it the specification if it says more, and limits that are the engine's own."""
    name = Text(engine["model"], overflow="fold")
    if engine["spec"] != engine["model"]:
        name.append(f"\n{engine['spec']}", "dim")
    if engine["limits"] != limits:
        name.append(f"\n{_limits(engine['limits'])}", "dim")
    return name


def _limits(limits: dict[str, int]) -> str:
    return (
        f"{limits['max_decode_sequences']} decodes, {limits['max_prefill_chunk_size']} tokens a chunk,"
        f" {limits['max_batch_size']} tokens a batch"
    )


def _in_flight(batch: dict[str, Any] | None) -> str:
    return f"{batch['steps']} ({duration(batch['for_s'])})" if batch else "-"


def _workers(workers: list[dict[str, Any]]) -> RenderableType:
    if not workers:
        return Text("no workers: this daemon spawns no engines of its own", "dim")
    table = _table("worker", "state", "pid", "restarts", "last exit")
    for worker in workers:
        table.add_row(
            Text(worker["spec"], overflow="fold"),
            _state(worker["state"]),
            str(worker["pid"] or "-"),
            str(worker["restarts"]),
            worker["last_exit"] or "-",
        )
    return table


def _clients(document: dict[str, Any]) -> RenderableType:
    clients, waiting, paused = document["clients"], document["waiting_sessions"], document["paused_clients"]
    if not clients:
        return Text("no clients", "dim")
    table = _table("client", "pid", "sessions", "outstanding", "arena", "unsent")
    for client in clients:
        table.add_row(
            str(client["client"]),
            str(client["pid"] or "-"),
            str(client["sessions"]),
            f"{client['outstanding']} (paused)" if client["paused"] else str(client["outstanding"]),
            size(client["arena_bytes"]),
            size(client["unsent_bytes"]),
        )
    captions = [_who_waits(document)] if waiting else []
    if paused:
        captions.append(
            f"{counted(paused, 'client is', 'clients are')} paused: {document['max_queued_steps']:,} steps may be queued"
        )
    if captions:
        table.caption = "; ".join(captions)
    return table


def _who_waits(document: dict[str, Any]) -> str:
    """Who waits for a slot, and who has them."""
    waits = "; ".join(
        f"{entry['sessions']} of pid {entry['pid']}" + (f" for {entry['model']}" if entry["model"] else "")
        for entry in document["waiting"][:_MOST_NAMED]
    )
    models = {entry["model"] for entry in document["waiting"]}
    holders: Counter[int] = Counter()
    for engine in document["engines"]:
        if "" in models or engine["model"] in models:
            holders.update({holder["pid"]: holder["sessions"] for holder in engine["held_by"]})
    held = ", ".join(f"pid {pid} ({n})" for pid, n in holders.most_common(_MOST_NAMED))
    who = counted(document["waiting_sessions"], "session waits", "sessions wait")
    return f"{who} for a free slot: {waits}. The slots are held by {held or 'nobody'}"


def _foot(document: dict[str, Any]) -> Text:
    memory = document["shared_memory"]
    return Text(
        f"limits: {_limits(document['limits'])}; shared memory {size(memory['used_bytes'])} of"
        f" {size(memory['limit_bytes'])}",
        "dim",
    )


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    table.add_column(first, overflow="fold", min_width=14)
    for column in columns:
        right = column not in ("state", "last exit")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    return table


def _state(state: str) -> Text:
    return Text(state, "green" if state in _GOOD else "yellow")


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def size(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"

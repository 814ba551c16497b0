"""The table and the JSON document of a stress run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from shmsched.tools.load import faults, trends
from shmsched.tools.load.run import Outcome
from shmsched.tools.load.target import Ledger

SHOWN = 5
QUANTILES = (50, 90, 99)


def latencies(outcome: Outcome) -> dict[str, float]:
    """Microseconds from the call of submit until its result was seen."""
    histogram = outcome.tally.latency
    return {
        **{f"p{q}": round(histogram.percentile(q), 1) for q in QUANTILES},
        "max": round(histogram.greatest, 1),
    }


def to_json(outcome: Outcome) -> dict[str, Any]:
    """The document that ``--json`` writes."""
    tally, options = outcome.tally, outcome.options
    seconds = outcome.seconds or 1.0
    return {
        "mode": options.mode.value,
        "clients": options.clients,
        "sessions": options.sessions,
        "engine": None if options.socket else options.engine,
        "engines": None if options.socket else options.engines,
        "seed": options.seed,
        "good": outcome.good,
        "interrupted": outcome.interrupted,
        "steps": tally.completed,
        "seconds": round(outcome.seconds, 3),
        "steps_per_s": round(tally.completed / seconds, 1),
        "tokens": tally.tokens,
        "tokens_per_s": round(tally.tokens / seconds, 1),
        "latency_us": latencies(outcome),
        "mean_batch": round(outcome.batch_steps / max(outcome.batches, 1), 3),
        "mean_batch_tokens": round(outcome.batch_tokens / max(outcome.batches, 1), 3),
        "wrong": tally.wrong,
        "lost": outcome.lost,
        "leaked": len(outcome.leaked),
        "failed": tally.failed,
        "ledger": asdict(outcome.ledger) if outcome.ledger else dict.fromkeys(Ledger.__slots__),
        "ledger_balanced": outcome.ledger_is_right,
        "exercised": {
            "cancels": tally.cancels,
            "cancels_late": tally.cancels_late,
            "rewinds": tally.rewinds,
            "sessions_opened": tally.sessions_opened,
            "sessions_closed": tally.sessions_closed,
            "pipelined": tally.pipelined,
            "rows_checked": tally.rows_checked,
            "patterns_checked": tally.patterns_checked,
            "leases_held": tally.leases_held,
            "drafts_accepted": tally.drafts_accepted,
            "connects": tally.connects,
            "generations": tally.generations,
            "stops": tally.stops,
            "forks": tally.forks,
        },
        "allowed": {
            "cancelled": tally.cancelled,
            "closed": tally.closed,
            "expired": tally.expired,
            "full": tally.full,
            "explained": sum(sum(errors.values()) for errors in outcome.found.explained.values()),
            "written_off": outcome.found.written_off,
        },
        "flat": outcome.is_flat,
        "over_time": [
            trends.series_to_json(name, quantity, series) for name, quantity, series in trends.watched(outcome)
        ],
        "chaos": faults.to_json(outcome),
        "quiet_neighbour": None if outcome.found.quiet is None else outcome.found.quiet.to_json(),
        "errors": dict(tally.errors),
        "examples": tally.examples,
        "left_behind": outcome.leaked,
        "problems": outcome.problems,
        "notes": outcome.notes,
    }


def show(outcome: Outcome, console: Console) -> None:
    """Print the table, and below it what was not as it must be."""
    document = to_json(outcome)
    options = outcome.options
    where = f"on {options.socket}" if options.socket else f"{options.engine} x {options.engines}"
    table = Table(
        title=f"stress {options.mode.value}: {options.clients} clients x {options.sessions} sessions, {where},"
        f" seed {options.seed}",
        title_justify="left",
        show_header=False,
    )
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value, is_right in _rows(outcome, document):
        style = "" if is_right is None else "green" if is_right else "bold red"
        table.add_row(name, value, style=style)
    console.print(table)
    faults.show(outcome, console)
    trends.show(outcome, console)
    said = [*outcome.tally.examples, *outcome.problems]
    said += [f"left behind: {what}" for what in outcome.leaked[:SHOWN]]
    said += [f"note: {note}" for note in outcome.notes]
    for line in said:
        console.print(
            line, style=None if line.startswith("note") else "red", markup=False, highlight=False, soft_wrap=True
        )
    if outcome.interrupted:
        console.print("interrupted before its time")


def _rows(outcome: Outcome, document: dict[str, Any]) -> list[tuple[str, str, bool | None]]:
    """Name, value, and whether it is as it must be (None: any value is)."""
    latency, exercised, allowed = document["latency_us"], document["exercised"], document["allowed"]
    ledger = outcome.ledger
    balance = (
        "unknown"
        if ledger is None
        else (
            f"submitted {ledger.submitted:,} = queued {ledger.queued:,} + in flight {ledger.in_flight:,}"
            f" + completed {ledger.completed:,} + failed {ledger.failed:,} + cancelled {ledger.cancelled:,}"
        )
    )
    errors = ", ".join(f"{name} x {n}" for name, n in document["errors"].items())
    # Only what no fault explains has failed; and what dead engines ran is known to nobody any more.
    blameless = " that no injected fault explains" if outcome.options.chaos else ""
    survivors = " of the engines that lived to the end" if outcome.options.chaos else ""
    return [
        ("steps/s", f"{document['steps_per_s']:,.0f}  ({document['steps']:,} in {document['seconds']:.1f} s)", None),
        ("tokens/s", f"{document['tokens_per_s']:,.0f}", None),
        ("latency (us)", "  ".join(f"{name} {value:,.0f}" for name, value in latency.items()), None),
        (
            "mean batch",
            f"{document['mean_batch']:.2f} steps, {document['mean_batch_tokens']:.2f} tokens"
            f" ({outcome.batches:,} batches{survivors})",
            None,
        ),
        (
            "sessions",
            f"{exercised['sessions_opened']:,} opened, {exercised['sessions_closed']:,} closed;"
            f" {exercised['rewinds']:,} rewinds, {exercised['pipelined']:,} pipelined submissions",
            None,
        ),
        (
            "cancels",
            f"{exercised['cancels']:,} in time, {exercised['cancels_late']:,} late;"
            f" {allowed['cancelled']:,} steps cancelled, {allowed['closed']:,} closed with their session",
            None,
        ),
        (
            "generations",
            f"{exercised['generations']:,}, {exercised['stops']:,} ended by a stop token, {allowed['expired']:,} steps too late;"
            f" {exercised['forks']:,} forks",
            None,
        ),
        ("full", f"{allowed['full']:,} calls made again later", None),
        (
            "checked",
            f"{exercised['rows_checked']:,} rows, {exercised['patterns_checked']:,} of them at every index;"
            f" {exercised['leases_held']:,} leases held; {exercised['drafts_accepted']:,} drafted tokens accepted",
            None,
        ),
        ("wrong", f"{document['wrong']:,}", document["wrong"] == 0),
        (
            "failed",
            f"{document['failed']:,}{blameless}{'  ' + errors if errors else ''}",
            document["failed"] == 0,
        ),
        ("lost", f"{document['lost']:,}", document["lost"] == 0),
        ("leaked", f"{document['leaked']:,}", document["leaked"] == 0),
        (
            "ledger",
            balance + ("" if outcome.ledger_is_right or ledger is None else "  DOES NOT BALANCE"),
            outcome.ledger_is_right,
        ),
        *_quiet(outcome),
        *trends.rows(outcome),
    ]


def _quiet(outcome: Outcome) -> list[tuple[str, str, bool | None]]:
    quiet = outcome.found.quiet
    if quiet is None:
        return []
    said = f"{quiet.steps:,} steps, the longest wait {quiet.longest:.2f} s"
    if quiet.late:
        said += (
            f"; {quiet.late:,} beyond its bound, of the longest {quiet.longest_ours:.2f} s while nobody was paused and the"
            " machine let it run"
        )
    return [("quiet neighbour", said, not quiet.unexplained)]

"""The tables and the JSON document of a stress run."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from shmsched.tools.load.chaos import EXPLAINS, Fault
from shmsched.tools.load.target import LEDGER
from shmsched.tools.load.trend import LEAST_SAMPLES, Series
from shmsched.tools.load.verdict import Outcome

SHOWN = 5
EXERCISED = (
    "cancels", "cancels_late", "rewinds", "sessions_opened", "sessions_closed", "pipelined", "rows_checked",
    "patterns_checked", "leases_held", "drafts_accepted", "connects", "generations", "stops", "forks",
)  # fmt: skip
ALLOWED = ("cancelled", "closed", "expired", "full")


def to_json(outcome: Outcome) -> dict[str, Any]:
    """The document that ``--json`` writes."""
    tally, options = outcome.tally, outcome.options
    seconds, batches = outcome.seconds or 1.0, max(outcome.batches, 1)
    latency = {f"p{q}": min(tally.latencies.percentile(q), tally.longest_us) for q in (50, 90, 99)}
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
        "latency_us": {name: round(us, 1) for name, us in {**latency, "max": tally.longest_us}.items()},
        "mean_batch": round(outcome.batch_steps / batches, 3),
        "mean_batch_tokens": round(outcome.batch_tokens / batches, 3),
        "wrong": tally.wrong,
        "lost": outcome.lost,
        "leaked": len(outcome.leaked),
        "failed": tally.failed,
        "ledger": {name: outcome.ledger and outcome.ledger[name] for name in LEDGER},
        "ledger_balanced": outcome.ledger_is_right,
        "exercised": {name: getattr(tally, name) for name in EXERCISED},
        "allowed": {
            **{name: getattr(tally, name) for name in ALLOWED},
            "explained": sum(errors.total() for errors in outcome.explained.values()),
            "written_off": outcome.written_off,
        },
        "flat": outcome.is_flat,
        "over_time": [_over_time(series) for series in outcome.series if series.values],
        "chaos": {fault.value: _fault(outcome, fault) for fault in options.chaos.asked_for} or None,
        "quiet_neighbour": outcome.quiet and asdict(outcome.quiet),
        "errors": dict(tally.errors),
        "examples": tally.examples,
        "left_behind": outcome.leaked,
        "problems": outcome.problems,
        "notes": outcome.notes,
    }


def _over_time(series: Series) -> dict[str, Any]:
    return {
        "process": series.process,
        "quantity": series.quantity,
        "unit": series.unit,
        "samples": len(series.values),
        "first": series.values[0],
        "last": series.values[-1],
        "peak": max(series.values),
        "slope_per_minute": series.slope,
        "growth": series.growth,
        "bound": series.bound,
        "flat": series.is_flat,
    }


def _fault(outcome: Outcome, fault: Fault) -> dict[str, Any]:
    """How often it was injected, and what came of it."""
    tally, chaos = outcome.tally, outcome.options.chaos
    hits = [one for one in outcome.injected if one.fault is fault]
    injected, came = len(hits), dict[str, int]()
    match fault:
        case Fault.KILL_ENGINE:
            came = {"engines killed": len(outcome.pids(fault)), "engines restarted": outcome.restarts}
        case Fault.STOP_ENGINE:
            # One that was idle when it was stopped, or killed before its time was up, did not time out.
            restarts = outcome.restarts - len(outcome.pids(Fault.KILL_ENGINE))
            came = {"engines stopped": len(outcome.pids(fault)), "engines timed out": max(0, restarts)}
        case Fault.KILL_CLIENT:
            came = {"clients replaced": injected, "steps written off": outcome.written_off}
        case Fault.STOP_CLIENT:
            came = {"clients disconnected": outcome.disconnected}
        case Fault.GARBAGE:
            injected, came = tally.attacks.total(), dict(tally.attacks.most_common())
        case Fault.INTERRUPT:
            injected, came = tally.interrupts.total(), dict(tally.interrupts)
        case Fault.PAUSE:
            came = {"seconds, all in all": round(sum(one.until - one.at for one in hits))}
        case Fault.SHORT_DESCRIPTORS | Fault.SHORT_MEMORY:
            came = {f"of {whom}": n for whom, n in sorted(Counter(one.whom for one in hits).items())}
        case Fault.CANCEL:
            injected = tally.cancels + tally.cancels_late
            came = {"in time": tally.cancels, "late": tally.cancels_late, "steps cancelled": tally.cancelled}
        case Fault.PID_NAMESPACE:
            injected = outcome.apart
    if fault in chaos.shares:
        return {"share": chaos.shares[fault], "injected": injected, "came_of_it": came}
    return {
        "every_s": chaos.every_s[fault],
        "injected": injected,
        "came_of_it": came,
        "steps_failed": dict(outcome.explained.get(fault, {})),
        "longest_pause_s": round(outcome.pauses.get(fault, 0.0), 3),
        "not_injected": outcome.not_injected.get(fault),
    }


# --- for people ---------------------------------------------------------------------------------------------------------


def show(outcome: Outcome, console: Console) -> None:
    """Print the tables, and below them what was not as it must be."""
    document, options = to_json(outcome), outcome.options
    where = f"on {options.socket}" if options.socket else f"{options.engine} x {options.engines}"
    title = f"stress {options.mode.value}: {options.clients} clients x {options.sessions} sessions, {where}, seed {options.seed}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in _figures(outcome, document).items():
        table.add_row(name, value)
    for name, (value, is_right) in _verdicts(outcome).items():
        table.add_row(name, value, style="" if is_right is None else "green" if is_right else "bold red")
    console.print(table)
    if document["chaos"]:
        _show_faults(document["chaos"], console)
    if document["over_time"]:
        _show_series(outcome, console)
    said = [*outcome.tally.examples, *outcome.problems]
    said += [f"left behind: {what}" for what in outcome.leaked[:SHOWN]]
    said += [f"note: {note}" for note in outcome.notes]
    for line in said:
        style = None if line.startswith("note") else "red"
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
    if outcome.interrupted:
        console.print("interrupted before its time")


def _figures(outcome: Outcome, document: dict[str, Any]) -> dict[str, str]:
    tally = outcome.tally
    # What dead engines ran is known to nobody any more.
    survivors = " of the engines that lived to the end" if outcome.options.chaos else ""
    return {
        "steps/s": f"{document['steps_per_s']:,.0f}  ({document['steps']:,} in {document['seconds']:.1f} s)",
        "tokens/s": f"{document['tokens_per_s']:,.0f}",
        "latency (us)": "  ".join(f"{name} {us:,.0f}" for name, us in document["latency_us"].items()),
        "mean batch": f"{document['mean_batch']:.2f} steps, {document['mean_batch_tokens']:.2f} tokens"
        f" ({outcome.batches:,} batches{survivors})",
        "sessions": f"{tally.sessions_opened:,} opened, {tally.sessions_closed:,} closed; {tally.rewinds:,} rewinds,"
        f" {tally.pipelined:,} pipelined submissions",
        "cancels": f"{tally.cancels:,} in time, {tally.cancels_late:,} late; {tally.cancelled:,} steps cancelled,"
        f" {tally.closed:,} closed with their session",
        "generations": f"{tally.generations:,}, {tally.stops:,} ended by a stop token, {tally.expired:,} steps too late;"
        f" {tally.forks:,} forks",
        "full": f"{tally.full:,} calls made again later",
        "checked": f"{tally.rows_checked:,} rows, {tally.patterns_checked:,} of them at every index;"
        f" {tally.leases_held:,} leases held; {tally.drafts_accepted:,} drafted tokens accepted",
    }


def _verdicts(outcome: Outcome) -> dict[str, tuple[str, bool | None]]:
    """By name: in words, and whether it is as it must be (None: nobody can tell)."""
    tally, ledger, quiet = outcome.tally, outcome.ledger, outcome.quiet
    balance = "unknown"
    if ledger is not None:
        submitted, *parts = (f"{name.replace('_', ' ')} {ledger[name]:,}" for name in LEDGER)
        balance = f"{submitted} = {' + '.join(parts)}" + ("" if outcome.ledger_is_right else "  DOES NOT BALANCE")
    errors = "".join(f"  {name} x {n}" for name, n in tally.errors.items())
    blameless = " that no injected fault explains" if outcome.options.chaos else ""
    verdicts: dict[str, tuple[str, bool | None]] = {
        "wrong": (f"{tally.wrong:,}", tally.wrong == 0),
        "failed": (f"{tally.failed:,}{blameless}{errors}", tally.failed == 0),
        "lost": (f"{outcome.lost:,}", outcome.lost == 0),
        "leaked": (f"{len(outcome.leaked):,}", not outcome.leaked),
        "ledger": (balance, outcome.ledger_is_right),
    }
    if quiet is not None:
        said = f"{quiet.steps:,} steps, the longest wait {quiet.longest_wait_s:.2f} s"
        if quiet.late:
            said += (
                f"; {quiet.late:,} beyond its bound, of the longest {quiet.longest_wait_of_ours_s:.2f} s while nobody was"
                " paused and the machine let it run"
            )
        verdicts["quiet neighbour"] = (said, not quiet.late_and_unexplained)
    judged = [series for series in outcome.series if outcome.judges(series)]
    grown = [series for series in judged if series.is_flat is False]
    if any(series.is_flat is None for series in judged):
        verdicts["flat"] = (f"too short to tell: at least {LEAST_SAMPLES} samples are needed", None)
    elif judged:
        said = ", ".join(f"{s.process} {s.quantity} {_number(s.growth, s.unit)}" for s in grown or judged)
        verdicts["GROWS" if grown else "flat"] = (said, not grown)
    return verdicts


def _show_faults(document: dict[str, Any], console: Console) -> None:
    table = Table(title="faults injected", title_justify="left")
    table.add_column("fault", no_wrap=True)
    table.add_column("injected", justify="right")
    table.add_column("what came of it")
    table.add_column("steps that failed of it")
    table.add_column("longest pause\nof the others", justify="right")
    for name, row in document.items():
        often = f"{row['share']:.0%}" if "share" in row else f"{row['every_s']:g} s"
        errors = ", ".join(f"{error} x {n:,}" for error, n in sorted(row.get("steps_failed", {}).items()))
        pause = row.get("longest_pause_s")
        table.add_row(
            f"{name} ({often})",
            f"{row['injected']:,}",
            row.get("not_injected") or "\n".join(f"{what} {n:,}" for what, n in row["came_of_it"].items()),
            errors or ("none" if Fault(name) in EXPLAINS else ""),
            "" if pause is None else f"{pause:.2f} s" if pause else "none",
        )
    console.print(table)


def _show_series(outcome: Outcome, console: Console) -> None:
    table = Table(title="held over time", title_justify="left")
    table.add_column("process", no_wrap=True)
    table.add_column("quantity", no_wrap=True)
    for heading in ("first", "last", "peak", "a minute", "growth", "at most"):
        table.add_column(heading, justify="right")
    for series in (series for series in outcome.series if series.values):
        judged = outcome.judges(series)
        numbers = (series.values[0], series.values[-1], max(series.values), series.slope, series.growth)
        shown = [_number(number, series.unit) for number in numbers]
        shown.append(_number(series.bound, series.unit) if judged else "not judged")
        style = "bold red" if judged and series.is_flat is False else ""
        table.add_row(series.process, series.quantity, *shown, style=style)
    console.print(table)
    said = "growth: from the middle third of the samples to the last, by mean and by least; memory: resident and not shared"
    console.print(said, style="dim", soft_wrap=True)


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:,.1f} {unit}".rstrip()

"""The table of the faults that were injected, and what came of each."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from shmsched.tools.load.chaos import EXPLAINS, SHARES, Fault
from shmsched.tools.load.injector import Injector
from shmsched.tools.load.run import Outcome


def to_json(outcome: Outcome) -> dict[str, Any] | None:
    """By kind of fault. None where none were asked for."""
    injector, found, tally = outcome.injector, outcome.found, outcome.tally
    if injector is None:
        return None
    document: dict[str, Any] = {}
    for fault, every in injector.chaos.every_s.items():
        document[fault.value] = {
            "every_s": every,
            "injected": outcome.found.interrupts if fault is Fault.INTERRUPT else injector.count(fault),
            "came_of_it": _came_of_it(outcome, injector, fault),
            "steps_failed": found.explained.get(fault, {}),
            "longest_pause_s": round(found.pauses.get(fault, 0.0), 3),
            "not_injected": injector.not_injected.get(fault),
        }
    if (share := injector.chaos.shares.get(Fault.PID_NAMESPACE)) is not None:
        clients = outcome.clients_apart
        document[Fault.PID_NAMESPACE.value] = {"share": share, "injected": clients, "came_of_it": {}}
    if (share := injector.chaos.shares.get(Fault.CANCEL)) is not None:
        document[Fault.CANCEL.value] = {
            "share": share,
            "injected": tally.cancels + tally.cancels_late,
            "came_of_it": {"in time": tally.cancels, "late": tally.cancels_late, "steps cancelled": tally.cancelled},
        }
    return document


def _came_of_it(outcome: Outcome, injector: Injector, fault: Fault) -> dict[str, int]:
    match fault:
        case Fault.KILL_ENGINE:
            return {"engines killed": len(injector.pids(fault)), "engines restarted": outcome.restarts}
        case Fault.STOP_ENGINE:
            # One that was idle when it was stopped, or killed before its time was up, did not time out.
            restarts = outcome.restarts - len(injector.pids(Fault.KILL_ENGINE))
            return {"engines stopped": len(injector.pids(fault)), "engines timed out": max(0, restarts)}
        case Fault.KILL_CLIENT:
            return {"clients replaced": injector.count(fault), "steps written off": outcome.found.written_off}
        case Fault.STOP_CLIENT:
            return {"clients disconnected": len(injector.disconnected)}
        case Fault.GARBAGE:
            return dict(injector.garbage.attacks.most_common())
        case Fault.INTERRUPT:
            return outcome.found.interrupted
        case Fault.PAUSE:
            return {"seconds, all in all": round(sum(i.until - i.at for i in injector.injected if i.fault is fault))}
        case Fault.SHORT_DESCRIPTORS | Fault.SHORT_MEMORY:
            hit = Counter(i.whom for i in injector.injected if i.fault is fault)
            return {f"of {whom}": n for whom, n in sorted(hit.items())}
        case _:
            return {}


def show(outcome: Outcome, console: Console) -> None:
    """Print it, if faults were asked for."""
    document = to_json(outcome)
    if document is None:
        return
    table = Table(title="faults injected", title_justify="left")
    table.add_column("fault", no_wrap=True)
    table.add_column("injected", justify="right")
    table.add_column("what came of it")
    table.add_column("steps that failed of it")
    table.add_column("longest pause\nof the others", justify="right")
    for name, row in document.items():
        fault = Fault(name)
        often = f"{row['share']:.0%}" if fault in SHARES else f"{row['every_s']:g} s"
        errors = ", ".join(f"{error} x {n:,}" for error, n in sorted(row.get("steps_failed", {}).items()))
        pause = row.get("longest_pause_s")
        table.add_row(
            f"{name} ({often})",
            f"{row['injected']:,}",
            row.get("not_injected") or "\n".join(f"{what} {n:,}" for what, n in row["came_of_it"].items()),
            errors or ("none" if fault in EXPLAINS else ""),
            "" if pause is None else f"{pause:.2f} s" if pause else "none",
        )
    console.print(table)

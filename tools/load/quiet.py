"""How the quiet neighbour fared: whether each of its answers came in time, or what else than us explains that it did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shmsched.tools.load.chaos import Fault
from shmsched.tools.load.fleet import Fleet, Part
from shmsched.tools.load.injector import Injected
from shmsched.tools.load.neighbour import BOUND_S, Wait

SHOWN = 5


@dataclass(slots=True)
class Quiet:
    """Its verdict. Seconds."""

    steps: int = 0
    longest: float = 0.0
    """As it waited."""
    longest_ours: float = 0.0
    """Of those beyond the bound, without the time in which all were paused or this machine did not let it run."""
    late: int = 0
    """Waits beyond the bound."""
    unexplained: list[str] = field(default_factory=list)
    """Those of them that are ours, in words."""

    @property
    def problems(self) -> list[str]:
        more = len(self.unexplained) - SHOWN
        return self.unexplained[:SHOWN] + ([f"and {more} more such waits of the quiet neighbour"] if more > 0 else [])

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "bound_s": BOUND_S,
            "longest_wait_s": round(self.longest, 3),
            "longest_wait_of_ours_s": round(self.longest_ours, 3),
            "late": self.late,
            "late_and_unexplained": len(self.unexplained),
        }


def judge(fleet: Fleet, injected: Sequence[Injected]) -> Quiet | None:
    """None if there was no quiet neighbour."""
    client = next((c for c in fleet.clients if c.part is Part.QUIET), None)
    if client is None:
        return None
    waits = [Wait(**wait) for wait in client.waits.get("late", ())]
    quiet = Quiet(client.tally.completed, client.waits.get("longest", 0.0), late=client.waits.get("n_late", 0))
    for wait in waits:
        paused = sum(
            max(0.0, min(wait.at + wait.waited, one.until) - max(wait.at, one.at))
            for one in injected
            if one.fault is Fault.PAUSE
        )
        # Where it was paused with all the others it overslept as well: that is the same time, and counts once.
        ours = wait.waited - max(paused, wait.machine)
        quiet.longest_ours = max(quiet.longest_ours, ours)
        if ours > BOUND_S:
            quiet.unexplained.append(
                f"the quiet neighbour waited {wait.waited:.2f} s for a step; {BOUND_S:g} s are allowed, all were paused for"
                f" {paused:.2f} s of it, and a thread of its that only sleeps overslept {wait.machine:.2f} s"
            )
    return quiet

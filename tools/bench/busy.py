"""Scenario ``busy``: how much of its time an engine with work to do is kept at it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from shmsched import Client, Control
from shmsched.tools.bench.contestant import LEAD_S, Contestant
from shmsched.tools.bench.crew import BenchFault
from shmsched.tools.bench.load import ANSWER_S
from shmsched.tools.bench.measure import Bar, Effort, Finding, Series, Verdict, alternate
from shmsched.tools.bench.plan import Plan, Transport

NAME = "busy"
STEP_US = 10_000
LEAST_S = 1.0
MARGIN_S = 0.1
"""Left out at either end of a round."""
ENGINE = "shmsched.tools.bench.clocked:Clocked"
PLAN = Plan(transport=Transport.SHMSCHED, clients=4, sessions=8, batch=32, step_us=STEP_US, engine=ENGINE)
DRIVERS = {"client-driven": (False, 90.0), "scheduler-driven": (True, 96.0)}
"""Whether the scheduler continues by itself, and the bar."""


def run(effort: Effort) -> Finding:
    """The engine is busy while it is in ``forward``, by its own clock: it sleeps 10 ms there (which on an idle core take up to 0.3
    more), and looks up its answers. Not busy is it while its host, the scheduler and the clients hand over."""
    busy: dict[str, list[float]] = {name: [] for name in DRIVERS}
    sizes: dict[str, list[float]] = {name: [] for name in DRIVERS}
    with ExitStack() as stack:
        runs: dict[str, Callable[[], float]] = {}
        for name, (streamed, _) in DRIVERS.items():
            contestant = stack.enter_context(Contestant(replace(PLAN, streamed=streamed)))
            assert contestant.socket is not None
            control = stack.enter_context(Control(contestant.socket))
            client = stack.enter_context(Client(socket=contestant.socket))
            runs[name] = _runner(contestant, control, EngineClock(client), effort, busy[name], sizes[name])
        values = alternate(runs, effort)
    finding = Finding(scenario=NAME)
    finding.series = [Series(name=name, unit="steps/s", values=got) for name, got in values.items()]
    for name, (_, bar) in DRIVERS.items():
        finding.verdicts.append(Verdict(what=f"engine busy, {name}", unit="%", values=busy[name], bar=Bar(limit=bar)))
    finding.verdicts.append(
        Verdict(
            what="mean batch of 32, client-driven", unit="steps", values=sizes["client-driven"], bar=Bar(limit=30.0)
        )
    )
    return finding


class EngineClock:
    """Reads the engine's clock, by a step of a session of its own."""

    def __init__(self, client: Client) -> None:
        self._session = client.open_session()

    def share(self, begin: float, end: float) -> float:
        """How much of the time between two moments, of ``time.monotonic()``, the engine was busy."""
        (first_s, first_ms), (last_s, last_ms) = self._read(begin), self._read(end)
        return (last_ms - first_ms) / 1000.0 / (last_s - first_s)

    def _read(self, when: float) -> tuple[float, float]:
        """The time and the clock, as a batch ends that began after ``when``."""
        time.sleep(max(0.0, when - time.monotonic()))
        response = self._session.submit([1]).result(ANSWER_S)
        assert response.logprobs is not None
        return time.monotonic(), float(response.logprobs[0])


class Watching(threading.Thread):
    """Watches the engine's clock while a round goes on."""

    def __init__(self, clock: EngineClock, begin: float, end: float) -> None:
        super().__init__(daemon=True)
        self._clock, self._begin, self._end = clock, begin, end
        self._share: float | None = None
        self.start()

    def run(self) -> None:
        self._share = self._clock.share(self._begin, self._end)

    def share(self) -> float:
        """Raises BenchFault if the engine's clock could not be read."""
        self.join(2 * ANSWER_S)
        if self._share is None:
            raise BenchFault("busy: the engine's clock could not be read; what was in the way is on standard error")
        return self._share


def _runner(
    contestant: Contestant, control: Control, clock: EngineClock, effort: Effort, busy: list[float], sizes: list[float]
) -> Callable[[], float]:
    def run() -> float:
        before, seconds = _engine(control), max(LEAST_S, effort.seconds)
        start = time.monotonic() + LEAD_S + effort.warm_up
        watching = Watching(clock, start + MARGIN_S, start + seconds - MARGIN_S)
        result = contestant.run(effort.warm_up, seconds)
        busy.append(100.0 * watching.share())
        after = _engine(control)
        sizes.append((after["steps"] - before["steps"]) / (after["batches"] - before["batches"]))
        return result.steps_per_s

    return run


def _engine(control: Control) -> dict[str, Any]:
    engine: dict[str, Any] = control.status()["engines"][0]
    return engine

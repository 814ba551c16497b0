"""``shmsched stress --chaos`` and ``--soak``: what was injected is no fault of ours, and all else still is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Run, assert_balanced

from shmsched.tools.load.shortages import stopped

from processes.leftovers import wait_until


def assert_nothing_wrong(run: Run) -> None:
    assert run.status == 0, run.out + run.err
    assert [run.results[name] for name in ("wrong", "lost", "leaked", "failed")] == [0, 0, 0, 0]
    assert run.results["flat"] is True
    assert_balanced(run)


def test_with_every_fault_at_once_nothing_is_wrong_or_lost(stress: Callable[..., Run]) -> None:
    faults = "kill-engine=1.5,stop-engine=4,kill-client=1.5,stop-client=2,garbage=0.2,cancel=0.2"
    run = stress("--clients", "3", "--sessions", "6", "--engines", "2", "--seconds", "7", "--chaos", faults)
    assert_nothing_wrong(run)
    chaos = run.results["chaos"]
    assert all(chaos[fault]["injected"] for fault in ("kill-engine", "kill-client", "stop-client", "garbage", "cancel"))
    assert chaos["kill-client"]["came_of_it"]["clients replaced"] == chaos["kill-client"]["injected"]
    assert set(chaos["kill-engine"]["steps_failed"]) <= {"EngineDied", "SessionLost"}
    assert chaos["kill-engine"]["steps_failed"]
    assert chaos["kill-engine"]["came_of_it"]["engines restarted"] > 0
    assert sum(chaos["garbage"]["came_of_it"].values()) > 0
    # Later clients took the place of those that were killed.
    assert run.results["exercised"]["connects"] > 3
    assert "faults injected" in run.out
    assert "kill-engine (1.5 s)" in run.out


def test_a_stopped_engine_times_out_and_that_is_what_its_steps_say(stress: Callable[..., Run]) -> None:
    run = stress("--seconds", "6", "--mode", "generate", "--chaos", "stop-engine=1.5")
    assert_nothing_wrong(run)
    stopped = run.results["chaos"]["stop-engine"]
    # Whether a step was in its hands when it was stopped is chance; its sessions are lost in any case.
    assert "SessionLost" in stopped["steps_failed"]
    assert set(stopped["steps_failed"]) <= {"EngineTimeout", "SessionLost"}
    assert stopped["came_of_it"]["engines timed out"] >= 1


def test_a_wrong_answer_is_found_under_chaos(stress: Callable[..., Run], engines: str) -> None:
    run = stress("--engine", f"{engines}:Liar", "--seconds", "2", "--chaos", "kill-client=0.5,garbage=0.5,cancel=0.1")
    assert run.status == 1
    assert run.results["wrong"] > 0
    assert "wrong: session" in run.out


def test_what_no_fault_explains_has_failed(stress: Callable[..., Run], engines: str) -> None:
    """Clients are stopped, engines are not: one that ends by itself is our fault, though steps may fail in this run."""
    run = stress("--engine", f"{engines}:Dying", "--seconds", "2", "--chaos", "stop-client=0.5")
    assert run.status == 1
    assert run.results["errors"]["EngineDied"] > 0
    assert run.results["failed"] > 0
    assert run.results["chaos"]["stop-client"]["steps_failed"] == {}
    assert "which no fault had hit" in run.out
    assert run.results["wrong"] == run.results["lost"] == run.results["leaked"] == 0
    assert_balanced(run)


def test_interrupts_pauses_shortages_and_namespaces_harm_nobody(stress: Callable[..., Run]) -> None:
    faults = "interrupt=0.1,pause=3,short-descriptors=2,short-memory=2,short-pids=3,full-shm=2,pid-namespace=0.4,kill-client=2"
    run = stress("--clients", "3", "--sessions", "6", "--engines", "2", "--seconds", "8", "--chaos", faults)
    assert_nothing_wrong(run)
    chaos = run.results["chaos"]
    for fault in ("interrupt", "pause", "short-descriptors", "short-memory", "short-pids", "full-shm", "pid-namespace"):
        assert chaos[fault]["injected"] or chaos[fault].get("not_injected"), fault
    for fault in ("pause", "short-pids"):
        assert chaos[fault]["steps_failed"] == {}, fault
    assert run.results["quiet_neighbour"]["steps"] > 50
    assert run.results["quiet_neighbour"]["late_and_unexplained"] == 0


@pytest.mark.prints("OddError", "nowhere", "Traceback")
@pytest.mark.parametrize("chaos", [(), ("--chaos", "garbage=0.5")], ids=["no chaos", "chaos"])
def test_what_an_engine_prints_and_nobody_knows_is_found(
    chaos: tuple[str, ...], stress: Callable[..., Run], engines: str
) -> None:
    run = stress("--engine", f"{engines}:Printing", "--seconds", "1.5", "--mode", "decode", *chaos)
    assert run.status == 1
    assert "the daemon or an engine printed: OddError: of an engine's" in run.out
    assert [run.results[name] for name in ("wrong", "lost", "leaked", "failed")] == [0, 0, 0, 0]


def test_a_daemon_that_lets_a_quiet_client_wait_is_found(stress: Callable[..., Run]) -> None:
    """It alone is stopped now and then, which no fault of the run explains."""

    def stop_the_daemon(pid: int) -> None:
        wait_until(lambda: _of(pid, "tools.load.neighbour", mapped=True), "the quiet neighbour to be connected", 60)
        wait_until(lambda: len(_of(pid, "tools.load.client", mapped=True)) == 2, "the clients to be connected", 60)
        (daemon,) = _of(pid, "shmsched.daemon")
        # Not at once: the run begins when the last of them has said that it is ready.
        for _ in range(3):
            time.sleep(0.6)
            with stopped(daemon):
                time.sleep(1.0)

    run = stress("--seconds", "6", "--mode", "decode", "--chaos", "kill-client=3", while_it_runs=stop_the_daemon)
    assert run.status == 1
    assert "the quiet neighbour waited " in run.out
    assert run.results["quiet_neighbour"]["late_and_unexplained"] >= 1
    assert [run.results[name] for name in ("wrong", "lost", "leaked", "failed")] == [0, 0, 0, 0]


def _of(pid: int, module: str, *, mapped: bool = False) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes()
        and (not mapped or "shmsched-" in Path(f"/proc/{child}/maps").read_text())
    ]


def test_a_step_that_is_never_answered_is_lost(stress: Callable[..., Run], engines: str) -> None:
    run = stress("--engine", f"{engines}:Hanging", "--seconds", "1.5", "--chaos", "garbage=0.5")
    assert run.status == 1
    assert run.results["lost"] > 0
    assert "lost: " in run.out


def test_a_short_soak_is_flat(stress: Callable[..., Run]) -> None:
    run = stress("--soak", "20000")
    assert_nothing_wrong(run)
    assert run.results["steps"] >= 20_000
    assert run.results["exercised"]["connects"] >= 200
    assert run.results["exercised"]["sessions_opened"] >= 200
    held = run.results["over_time"]
    assert {(row["process"], row["quantity"]) for row in held} == {
        (process, quantity)
        for process in ("daemon", "engine 0")
        for quantity in ("memory", "descriptors", "shared memory")
    }
    assert all(row["flat"] for row in held)


def test_a_soak_finds_an_engine_that_leaks(stress: Callable[..., Run], engines: str) -> None:
    run = stress("--soak", "10000", "--engine", f"{engines}:Leaking", "--mode", "decode")
    assert run.status == 1
    (row,) = (r for r in run.results["over_time"] if (r["process"], r["quantity"]) == ("engine 0", "memory"))
    assert row["flat"] is False
    assert row["growth"] > row["bound"]
    assert "GROWS" in run.out


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_million_steps_are_flat(stress: Callable[..., Run]) -> None:
    run = stress("--soak", "--clients", "4")
    assert_nothing_wrong(run)
    assert run.results["steps"] >= 1_000_000
    assert run.results["exercised"]["connects"] >= 10_000

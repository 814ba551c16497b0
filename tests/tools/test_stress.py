"""``shmsched stress`` as a user runs it: clean runs end clean, and each kind of fault is found."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Run, assert_balanced, assert_clean

import shmsched
from shmsched.cli.root import run

from processes.leftovers import wait_until


def clients_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"tools.load.client" in Path(f"/proc/{child}/cmdline").read_bytes()]


def at_work(pid: int) -> bool:
    """The clients are past their start: they have mapped their shared memory."""
    clients = clients_of(pid)
    return len(clients) == 2 and all("shmsched-" in Path(f"/proc/{c}/maps").read_text() for c in clients)


@pytest.mark.parametrize("mode", ["decode", "prefill", "mixed", "raw", "verify", "generate"])
def test_every_mode_runs_clean(mode: str, stress: Callable[..., Run]) -> None:
    run = stress("--mode", mode, "--seconds", "1.5")
    assert_clean(run)
    exercised = run.results["exercised"]
    assert exercised["sessions_opened"] >= 16
    assert exercised["rows_checked"] > 0
    assert (exercised["patterns_checked"] > 0) >= (mode == "raw")
    assert (exercised["leases_held"] > 0) >= (mode == "raw")
    assert (exercised["drafts_accepted"] > 0) >= (mode == "verify")
    if mode == "generate":
        # Of two clients the second generates on asyncio, with a connection of its own.
        assert exercised["connects"] == 3
        assert exercised["generations"] > 100
        assert min(exercised[name] for name in ("stops", "forks", "rewinds", "cancels")) > 0


def test_two_engines_run_clean(stress: Callable[..., Run]) -> None:
    run = stress("--mode", "mixed", "--seconds", "2", "--engines", "2")
    assert_clean(run)
    assert run.results["engines"] == 2
    assert run.results["exercised"]["cancels"] > 0
    assert run.results["exercised"]["rewinds"] > 0


def test_on_a_daemon_that_runs_already(stress: Callable[..., Run]) -> None:
    with shmsched.launch("echo?vocab=500&max_sessions=12") as cluster, cluster.client() as other:
        session = other.open_session()
        session.submit([1, 2, 3]).result(30)
        run = stress("--socket", str(cluster.socket), "--seconds", "1.5", "--mode", "mixed")
        assert_clean(run)
        assert run.results["notes"]
        # 16 sessions want 12 slots, of which one is somebody else's.
        assert run.results["allowed"]["full"] > 0
        assert len(cluster.status()["clients"]) == 1
        assert session.submit([4]).result(30).tokens.size == 1


@pytest.mark.parametrize("mode", ["decode", "raw", "generate"])
def test_a_wrong_answer_is_found(mode: str, stress: Callable[..., Run], engines: str) -> None:
    run = stress("--engine", f"{engines}:Liar", "--seconds", "1.5", "--mode", mode)
    assert run.status == 1
    assert run.results["wrong"] > 0
    assert run.results["lost"] == run.results["leaked"] == run.results["failed"] == 0
    assert "wrong: session" in run.out
    assert_balanced(run)


def test_a_failing_step_is_found_and_the_ledger_balances(stress: Callable[..., Run], engines: str) -> None:
    run = stress("--engine", f"{engines}:Raising", "--seconds", "1.5", "--mode", "mixed")
    assert run.status == 1
    assert run.results["failed"] > 0
    assert run.results["errors"]["EngineError"] > 0
    assert run.results["ledger"]["failed"] > 0
    assert run.results["wrong"] == run.results["lost"] == run.results["leaked"] == 0
    assert_balanced(run)


@pytest.mark.parametrize(("number", "told"), [(signal.SIGKILL, "died: killed by signal 9"), (signal.SIGSTOP, "hung")])
def test_a_client_that_is_gone_or_hangs_is_named(number: signal.Signals, told: str, stress: Callable[..., Run]) -> None:
    hit: list[int] = []

    def strike(pid: int) -> None:
        wait_until(lambda: at_work(pid), "the clients to be at work", 60)
        hit.append(clients_of(pid)[0])
        os.kill(hit[0], number)

    run = stress("--seconds", "2", "--mode", "decode", while_it_runs=strike)
    assert run.status == 1
    assert f"(pid {hit[0]}) {told}" in run.out
    assert run.results["leaked"] == 0
    assert run.results["wrong"] == 0


def test_a_daemon_that_dies_is_told_of_at_once(stress: Callable[..., Run]) -> None:
    def kill_the_daemon(pid: int) -> None:
        wait_until(lambda: at_work(pid), "the clients to be at work", 60)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        (daemon,) = (c for c in children if b"shmsched.daemon" in Path(f"/proc/{c}/cmdline").read_bytes())
        os.kill(int(daemon), signal.SIGKILL)

    run = stress("--seconds", "600", "--mode", "decode", while_it_runs=kill_the_daemon)
    assert run.status == 1
    assert run.results["errors"]["SchedulerDied"] > 0
    assert run.results["ledger"]["submitted"] is None
    assert run.results["leaked"] == 0
    assert "ended with status -9" in run.out


def test_ctrl_c_ends_it_early_and_in_order(stress: Callable[..., Run]) -> None:
    def interrupt(pid: int) -> None:
        wait_until(lambda: at_work(pid), "the clients to be at work", 60)
        os.kill(pid, signal.SIGINT)

    run = stress("--seconds", "600", "--mode", "mixed", while_it_runs=interrupt)
    assert run.status == 130, run.out + run.err
    assert run.results["interrupted"] is True
    assert run.results["wrong"] == run.results["lost"] == run.results["leaked"] == 0
    assert_balanced(run)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--clients", "0"], "--clients"),
        (["--mode", "nonsense"], "'nonsense' is not one of"),
        (["--seconds", "nan"], "nan is not from 0.1"),
        (["--seconds", "-1"], "-1 is not from 0.1"),
        (["--json", "/nonexistent/results.json"], "there is no directory /nonexistent"),
        (["--socket", "/tmp/x.sock", "--engines", "2"], "--engines is for a daemon of our own"),
        (["--socket", "/nonexistent/x.sock"], "socket's directory /nonexistent cannot be used"),
        (
            ["--engine", "echo?model=other"],
            "the engines serve 'other'; only the answers of model 'echo' can be checked",
        ),
        (["--engine", "echo?max_session_tokens=10"], "holds 10 tokens; at least 256"),
        (["--engine", "nonsense"], "nonsense"),
        (
            ["--chaos", "kill-server=2"],
            "'kill-server' is no fault; known are kill-engine, stop-engine, kill-client, stop-client, garbage, interrupt, pause,"
            " short-descriptors, short-memory, short-pids, full-shm, cancel, pid-namespace",
        ),
        (["--chaos", "kill-engine"], "kill-engine= is not a mean interval; from 0.05 to 86400 seconds is wanted"),
        (["--chaos", "garbage=nan"], "garbage=nan is not a mean interval"),
        (["--chaos", "cancel=1.5"], "cancel=1.5 is not a share of the submissions; from 0 to 1 is wanted"),
        (["--chaos", "pid-namespace=2"], "pid-namespace=2 is not a share of the clients; from 0 to 1 is wanted"),
        (["--chaos", "garbage=1,garbage=2"], "garbage is there twice"),
        (["--chaos", ""], "'' is no fault"),
        (["--socket", "/tmp/x.sock", "--chaos", "garbage=1"], "--chaos is for a daemon of our own"),
        (["--soak", "10"], "--soak"),
        (["--soak", "--seconds", "3"], "--seconds and --soak exclude each other"),
    ],
)
def test_what_cannot_be_run_is_said(arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    status = run(["stress", *arguments])
    lines = [line for line in capfd.readouterr().err.splitlines() if line]
    assert status in (1, 2, 3)
    if status == 2:
        assert lines.pop(0).startswith("Usage: ")
    assert lines[0].startswith("shmsched: ")
    assert said in lines[0]

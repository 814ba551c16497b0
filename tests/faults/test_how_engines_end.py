"""Whoever waits for an engine that ended is told how, and whoever asks for one that is not there, why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shmsched

from processes.engines import Ending
from processes.leftovers import wait_until
from processes.raising_engines import Raising
from processes.raising_engines import __file__ as RAISING_ENGINES
from processes.ways import ENGINES

DEADLINE = 30.0
SEGFAULT, KILL, EXIT, SYSTEM_EXIT, INTERRUPT = Ending.WAYS
SAID = {
    SEGFAULT: "killed by SIGSEGV",
    KILL: "killed by SIGKILL, perhaps because memory ran out",
    EXIT: "exit status 7",
    SYSTEM_EXIT: "exit status 3",
    INTERRUPT: "killed by SIGINT",
}


@pytest.mark.prints("KeyboardInterrupt")
@pytest.mark.parametrize("way", SAID)
def test_its_steps_its_sessions_the_log_and_the_status_say_how(way: int, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        shmsched.launch(f"{ENGINES}:Ending") as cluster,
        cluster.client() as client,
        client.open_session() as session,
        client.open_session() as idle,
    ):
        assert session.submit([1]).result(DEADLINE).tokens.size == 1
        (engine,) = cluster.status()["engines"]
        future = session.submit([way])
        said = rf"\(pid {engine['pid']}\) ended while it ran batch 2: {SAID[way]}"
        with pytest.raises(shmsched.EngineDied, match=said):
            future.result(DEADLINE)
        wait_until(lambda: idle.ended is not None, "the idle session to be lost", DEADLINE)
        assert re.search(said, str(idle.ended))
        (worker,) = cluster.status()["workers"]
        assert worker["last_exit"] == SAID[way]
    assert re.search(rf"^shmsched: engine .*{said}$", capfd.readouterr().err, re.MULTILINE)


def test_one_that_dies_without_a_step_is_told_of_too_and_new_sessions_find_its_successor() -> None:
    with shmsched.launch(f"{ENGINES}:Ending") as cluster, cluster.client() as client, client.open_session() as session:
        session.submit([1]).result(DEADLINE)
        (engine,) = cluster.status()["engines"]
        os.kill(engine["pid"], signal.SIGBUS)
        wait_until(lambda: session.ended is not None, "the session to be lost", DEADLINE)
        assert f"(pid {engine['pid']}) ended: killed by SIGBUS" in str(session.ended)
        with client.open_session(timeout=DEADLINE) as other:
            assert other.submit([1]).result(DEADLINE).tokens.size == 1


def test_the_steps_behind_it_are_told_as_well_and_nobody_else_notices() -> None:
    with (
        shmsched.launch(f"{ENGINES}:Ending", "echo?model=other") as cluster,
        cluster.client() as client,
        client.open_session(model="echo") as session,
        client.open_session(model="other") as other,
    ):
        session.submit([1]).result(DEADLINE)
        engine = next(e["pid"] for e in cluster.status()["engines"] if e["model"] == "echo")
        with subprocess.Popen(["sleep", "600"]) as unrelated:
            future = session.submit([SEGFAULT])
            later = [session.submit([1]) for _ in range(3)]
            with pytest.raises(shmsched.EngineDied, match="SIGSEGV"):
                future.result(DEADLINE)
            for waiting in later:
                with pytest.raises(shmsched.StepError, match=f"pid {engine}"):
                    waiting.result(DEADLINE)
            assert other.submit([1]).result(DEADLINE).tokens.size == 1
            assert unrelated.poll() is None
            unrelated.kill()


def test_of_an_engine_by_hand_it_is_said_what_can_be(capfd: pytest.CaptureFixture[str]) -> None:
    with shmsched.launch() as cluster, cluster.client() as client:
        command = [sys.executable, "-m", "shmsched.engine", f"{ENGINES}:Ending", "--socket", str(cluster.socket)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as engine:
            wait_until(lambda: client.models, "the engine to be attached", DEADLINE)
            with client.open_session() as session:
                session.submit([1]).result(DEADLINE)
                with pytest.raises(
                    shmsched.EngineDied,
                    match=rf"\(pid {engine.pid}\) ended while it ran batch 2: the peer closed the connection; its process",
                ):
                    session.submit([SEGFAULT]).result(DEADLINE)
            assert engine.wait(DEADLINE) == -signal.SIGSEGV


TROUBLES = {
    "start": ("RuntimeError: no weights here", "load", "start"),
    "constructor": ("ValueError: seven heads", "load", "__init__"),
    "exit": ("SystemExit: 3", "load", "start"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_why_it_did_not_start_is_told_with_its_own_frames(tmp_path: Path, trouble: str) -> None:
    raising, inner, outer = TROUBLES[trouble]
    fault = {"start": "raise RuntimeError('no weights here')", "exit": "sys.exit(3)"}.get(
        trouble, "raise ValueError('seven heads')"
    )
    file = tmp_path / "bad.py"
    file.write_text(
        "import sys\nfrom shmsched.workers.echo import Echo\n\ndef load():\n"
        f"    {fault}\n\nclass Bad(Echo):\n    def {outer}(self, *limits):\n        load()\n"
    )
    where = rf"\(at bad.py:5 in {inner}: {re.escape(fault)}, from bad.py:9 in {outer}\)"
    with pytest.raises(shmsched.EngineStartError, match=f"{raising} {where}") as told:
        shmsched.launch(f"{file}:Bad")
    err = told.value.said
    assert re.search(r"^shmsched engine .*bad.py:Bad \(pid \d+\) did not start:\nTraceback", err, re.MULTILINE)
    assert f'bad.py", line 5, in {inner}\n    {fault}\n' in err
    assert err.count("Traceback") == 1
    assert "shmsched/engine/" not in err, "frames of the host say nothing of the engine"


def test_a_module_that_raises_when_it_is_imported_is_told_of_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    for code, said in (("1 / 0", "ZeroDivisionError: division by zero"), ("raise SystemExit(4)", "SystemExit: 4")):
        file.write_text(f"\n{code}\n")
        where = rf"{said} \(at bad.py:2 in <module>: {re.escape(code)}"
        with pytest.raises(shmsched.EngineStartError, match=where) as told:
            shmsched.launch(f"{file}:Bad")
        assert f'bad.py", line 2, in <module>\n    {code}\n' in told.value.said


@pytest.mark.prints("no weights", "did not start:$")
def test_an_unknown_model_is_one_thing_and_an_engine_that_is_down_another(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "from shmsched.workers.echo import Echo\n\nclass Bad(Echo):\n    def start(self, limits):\n"
        "        raise RuntimeError('no weights')\n"
    )
    with (
        shmsched.launch("echo?model=a", "echo?model=b", f"{tmp_path}/bad.py:Bad?model=c") as cluster,
        cluster.client() as client,
    ):
        wait_until(lambda: len(client.models) == 2, "both models to be there", DEADLINE)
        with pytest.raises(shmsched.NoEngine, match="no engine is up for model 'c'; models served: a, b. .*no weights"):
            client.open_session(model="c")
        with pytest.raises(shmsched.UnknownModel, match="^unknown model 'd'; models served: a, b$"):
            client.open_session(model="d")
    with shmsched.launch() as cluster, cluster.client() as client:
        with pytest.raises(
            shmsched.NoEngine, match="no engine is up for model 'a'. .*`shmsched engine` attaches"
        ) as none:
            client.open_session(model="a")
        assert not isinstance(none.value, shmsched.UnknownModel)


RAISED = {
    "panic": r"Panic: index 7 of 3",
    "unspeakable": r"Unspeakable: \(its message cannot be read: ValueError\)",
    "silent": r"ValueError",
    "endless": r"ValueError: x{500}\.\.\. and 9,500 characters more",
}


@pytest.mark.prints("Panic", "Unspeakable", "ValueError")
@pytest.mark.parametrize("what", RAISED)
def test_whatever_an_engine_raises_is_told_and_the_engine_goes_on(what: str) -> None:
    """It need not be an Exception, nor have a message."""
    others = ("open_session", "rewind", "fork_session", "close_session") if what == "panic" else ()
    for method in ("forward", *others):
        with (
            shmsched.launch(f"{RAISING_ENGINES}:Raising?at={method}&what={what}") as cluster,
            cluster.client() as client,
            client.open_session() as session,
        ):
            session.submit([1, 2]).result(DEADLINE)
            (engine,) = cluster.status()["engines"]
            told = pytest.raises(shmsched.ShmschedError, match=f"{RAISED[what]}(\\. If it never can|$)")
            match method:
                case "forward":
                    with told:
                        session.submit([Raising.RAISE]).result(DEADLINE)
                case "open_session":
                    with told:
                        client.open_session(options=b"raise", timeout=DEADLINE)
                case "rewind":
                    with told:
                        session.submit([1], position=1).result(DEADLINE)
                case "fork_session":
                    with told:
                        session.fork(timeout=DEADLINE)
                case _:
                    session.close()
            with client.open_session(timeout=DEADLINE) as other:
                assert other.submit([1]).result(DEADLINE).tokens.size == 1
            assert [e["pid"] for e in cluster.status()["engines"]] == [engine["pid"]], method


@pytest.mark.parametrize(("method", "what"), [("__init__", "panic"), ("start", "panic"), ("start", "unspeakable")])
def test_whatever_it_raises_at_its_start_is_told_with_its_name(method: str, what: str) -> None:
    spec = f"{RAISING_ENGINES}:Raising?at={method}&what={what}"
    said = rf"^no engine came up: engine {re.escape(spec)} did not start: {RAISED[what]} \(at raising_engines.py:\d+ in _pass"
    with pytest.raises(shmsched.EngineStartError, match=said):
        shmsched.launch(spec)


def test_a_module_may_raise_what_is_no_exception(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("class Panic(BaseException):\n    pass\n\nraise Panic('index 7 of 3')\n")
    with pytest.raises(
        shmsched.EngineStartError, match=r"'.*bad.py' cannot be imported: Panic: index 7 of 3 \(at bad.py:4"
    ):
        shmsched.launch(f"{tmp_path}/bad.py:Bad")


def test_of_many_engines_each_that_did_not_start_is_named(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    with pytest.raises(
        shmsched.EngineStartError, match=r"dying.py:A did not start: killed by SIGSEGV; engine .*dying.py:B did not"
    ):
        shmsched.launch(f"{tmp_path}/dying.py:A", f"{tmp_path}/dying.py:B")

"""``shmsched status`` and ``shmsched stop``."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from commands import daemon, no_traceback, running, shmsched

from shmsched import Client
from shmsched.dataplane import BUILD


def socket_of(home: Path) -> Path:
    return home / "shmsched" / "default.sock"


def test_status_without_a_daemon_is_3(home: Path) -> None:
    done = shmsched(home, "status")
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert str(socket_of(home)) in done.stderr
    assert "shmsched up" in done.stderr


def test_status_without_an_engine_is_1(home: Path) -> None:
    with daemon(home):
        done = shmsched(home, "status")
        assert done.returncode == 1
        assert "no engine is attached" in done.stdout


def test_status_of_a_ready_daemon_is_0_and_shows_everything(home: Path) -> None:
    with daemon(home, "--engine", "echo?vocab=1000") as up, Client(socket=socket_of(home)) as client:
        with client.open_session() as session:
            session.submit([1, 2, 3]).result(30)
            done = shmsched(home, "status")
            document = json.loads(shmsched(home, "status", "--json").stdout)
        assert done.returncode == 0, done.stderr
        for word in (
            "balanced",
            "echo?vocab=1000",
            "ready",
            "attached",
            "1/1024",
            f"{BUILD}, pid {up.process.pid}",
            "limits:",
        ):
            assert word in done.stdout
        assert "\x1b" not in done.stdout
        assert (document["build"], document["pid"]) == (BUILD, up.process.pid)
        assert document["ledger"]["completed"] == 1
        assert document["ledger"]["balanced"] is True


def test_names_that_look_like_markup_are_shown_as_they_are(home: Path) -> None:
    with daemon(home, "--engine", "echo?model=[red]:smile:[/x]"):
        done = shmsched(home, "status")
        assert done.returncode == 0, done.stderr
        assert "[red]:smile:[/x]" in done.stdout


def test_watching_goes_on_until_interrupted_and_ends_with_the_status(home: Path) -> None:
    with daemon(home, "--engine", "echo"), running(home, "status", "--watch", "--json") as watching:
        watching.read_until(b"\n")
        watching.out = b""
        watching.read_until(b"\n")
        watching.process.send_signal(signal.SIGINT)
        assert watching.wait() == 0, watching.err
        assert json.loads(watching.out.splitlines()[0])["state"] == "running"
        assert no_traceback(watching.err)


def test_watching_a_daemon_that_ends_is_3(home: Path) -> None:
    with daemon(home) as up, running(home, "status", "--watch") as watching:
        watching.read_until(b"running")
        up.process.terminate()
        assert watching.wait() == 3
        assert watching.err.count("\n") == 1


def test_stop_ends_the_daemon_and_says_so(home: Path) -> None:
    with daemon(home, "--engine", "echo") as up:
        done = shmsched(home, "stop")
        assert done.returncode == 0, done.stderr
        assert str(up.process.pid) in done.stdout
        assert "no session is open" in done.stdout
        assert done.stdout.endswith("stopped\n")
        assert up.wait() == 0
        assert not socket_of(home).exists()


def test_stop_without_a_daemon_is_3(home: Path) -> None:
    done = shmsched(home, "stop")
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1


def test_stop_lets_an_open_session_go_on_until_it_is_closed(home: Path) -> None:
    with daemon(home, "--engine", "echo") as up, Client(socket=socket_of(home)) as client:
        with client.open_session() as session, running(home, "stop", "--drain-timeout", "50") as stopping:
            stopping.read_until(b"1 open session may go on for up to 50 s")
            assert session.submit([1]).result(30).tokens.size == 1
            assert shmsched(home, "status").returncode == 1, "it takes no new sessions"
            session.close()
            assert stopping.wait() == 0, stopping.err
        assert up.wait() == 0


def test_stop_now_and_stopping_again_end_open_sessions_at_once(home: Path) -> None:
    for again in (False, True):
        with daemon(home, "--engine", "echo") as up, Client(socket=socket_of(home)) as client, client.open_session():
            if again:
                up.process.terminate()
                with running(home, "stop") as stopping:
                    assert stopping.wait() == 0
            else:
                done = shmsched(home, "stop", "--now")
                assert done.returncode == 0, done.stderr
                assert "1 open session end" in done.stdout
            assert up.wait() == 0


def test_stop_after_the_drain_timeout(home: Path) -> None:
    with daemon(home, "--engine", "echo") as up, Client(socket=socket_of(home)) as client, client.open_session():
        assert shmsched(home, "stop", "--drain-timeout", "0.2").returncode == 0
        assert up.wait() == 0


def test_now_and_a_drain_timeout_contradict_each_other(home: Path) -> None:
    assert shmsched(home, "stop", "--now", "--drain-timeout", "1").returncode == 2

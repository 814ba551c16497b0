"""Faults of peers: they hang, stop, die and trickle; the others go on."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import shmsched
from shmsched.wire import frames
from shmsched.wire.codec import pack
from shmsched.wire.framing import framed

from faults.decoding import DEADLINE, VOCAB, Decoding
from faults.watched import HOLD, Record
from processes import engines as moods
from processes.leftovers import wait_until

MOODY = f"{moods.__file__}:Moody"


@contextmanager
def client_process(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A client in a process of its own. It is killed in the end, if it still runs."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def state_of(pid: int) -> str:
    """As in /proc: R, S, T for stopped, Z for dead and not waited for."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# --- F1 -----------------------------------------------------------------------------------------------------------------


def test_f1_a_stuck_engine_is_named_its_steps_fail_at_the_deadline_and_the_others_go_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with shmsched.launch(MOODY, engines=2, step_timeout_s=3.0) as cluster, cluster.client() as client:
        stuck, other = client.open_session(), Decoding(client)
        assert stuck.engine != other.session.engine
        other.go_on(1)
        future = stuck.submit([moods.HANG])

        def hanging() -> list[dict[str, Any]]:
            return [e for e in cluster.status()["engines"] if e["in_flight"] and e["in_flight"]["for_s"] > 0.2]

        wait_until(hanging, "status to tell of the stuck engine")
        (engine,) = hanging()
        assert engine["engine"] == stuck.engine
        assert engine["in_flight"]["batch"] == 1
        assert engine["in_flight"]["steps"] == len(engine["in_flight"]["sessions"]) == 1
        os.kill(engine["pid"], 0)
        other.go_on(50)
        (later,) = hanging()
        assert later["pid"] == engine["pid"]
        assert later["in_flight"]["for_s"] > engine["in_flight"]["for_s"]
        assert not future.done()
        named = rf"\(pid {engine['pid']}\) has not finished batch 1 of 1 step within 3 s"
        with pytest.raises(shmsched.EngineTimeout, match=named):
            future.result(DEADLINE)
        other.go_on(20)
        wait_until(lambda: not Path(f"/proc/{engine['pid']}").exists(), "the stuck engine to be killed")
    assert f"(pid {engine['pid']}) has not finished batch 1 of 1 step within 3 s" in capfd.readouterr().err


def test_f1_a_client_that_stops_reading_is_named_and_disconnected_at_its_bound(
    capfd: pytest.CaptureFixture[str],
) -> None:
    program = (
        "import shmsched, sys\n"
        "from shmsched.wire import frames\n"
        "from shmsched.wire.link import Link\n"
        "link = Link.connect(sys.argv[1], frames.Role.CLIENT)\n"
        "print('connected', flush=True)\n"
        "for session in range(1, 10**6):\n"
        "    if session == 4000:\n"
        "        sys.stdin.readline()\n"
        "    link.send(frames.OpenSession(session, 0, 'no such model' * 10, b''))\n"
    )
    with (
        shmsched.launch(f"echo?vocab={VOCAB}") as cluster,
        cluster.client() as client,
        client_process(program, cluster.socket) as stuck,
    ):
        assert line(stuck) == "connected"
        decoding = Decoding(client)

        def behind() -> list[dict[str, Any]]:
            return [c for c in cluster.status()["clients"] if c["unsent_bytes"] and c["unsent_for_s"] > 0.1]

        wait_until(behind, "status to tell of the client that does not read")
        (named,) = behind()
        assert named["pid"] == stuck.pid
        decoding.go_on(50)
        assert stuck.stdin is not None
        stuck.stdin.write("\n")
        stuck.stdin.flush()
        wait_until(lambda: len(cluster.status()["clients"]) == 1, "the client to be disconnected")
        decoding.go_on(50)
    err = capfd.readouterr().err
    assert f"client pid {stuck.pid} is disconnected after" in err
    assert "the peer does not read" in err


# --- F6 -----------------------------------------------------------------------------------------------------------------


def mapped(pid: int) -> int:
    """How many segments of ours the process maps."""
    return Path(f"/proc/{pid}/maps").read_text().count("/shmsched-")


def test_f6_what_a_dead_client_had_is_gone_within_one_batch(tmp_path: Path) -> None:
    """Its queued steps do not run, its session is closed in the engine, its memory is free."""
    program = (
        "import shmsched, sys\n"
        "client = shmsched.Client(socket=sys.argv[1])\n"
        "session = client.open_session()\n"
        "session.submit([1], sampling=None).result(30)\n"
        "futures = [session.submit([int(sys.argv[2])])] + [session.submit([t]) for t in range(900)]\n"
        "print('submitted', flush=True)\n"
        "futures[-1].result()\n"
    )
    record = Record(tmp_path)
    with shmsched.launch(record.spec) as cluster, cluster.client() as survivor:
        decoding = Decoding(survivor)
        decoding.go_on(1)
        engine = cluster.status()["engines"][0]["pid"]
        used = cluster.status()["shared_memory"]["used_bytes"]
        maps = [mapped(cluster.pid), mapped(engine)]
        with client_process(program, cluster.socket, HOLD) as doomed:
            assert line(doomed) == "submitted"
            wait_until(lambda: len(record.batches()) == 3, "the batch that is held to begin")
            wait_until(lambda: cluster.status()["ledger"]["submitted"] == 903, "the daemon to have all its steps")
            assert cluster.status()["shared_memory"]["used_bytes"] > used
            doomed.kill()
            wait_until(lambda: len(cluster.status()["clients"]) == 1, "the daemon to see that the client is gone")
        status = cluster.status()
        assert status["engines"][0]["in_flight"]["batch"] == 3
        assert (status["engines"][0]["sessions"], status["engines"][0]["queued"]) == (1, 0)
        assert status["shared_memory"]["used_bytes"] == used
        ledger = status["ledger"]
        assert (ledger["queued"], ledger["in_flight"], ledger["cancelled"]) == (0, 0, 901)
        assert record.closed() == []
        record.open_gate()
        wait_until(lambda: record.closed() == [1], "the engine to close the session")
        decoding.go_on(1)
        assert [slot for rows in record.batches()[3:] for slot, _, _ in rows] == [0]
        assert cluster.status()["engines"][0]["batches"] == 4
        wait_until(lambda: [mapped(cluster.pid), mapped(engine)] == maps, "daemon and engine to drop its memory")


# --- F9 -----------------------------------------------------------------------------------------------------------------

WORKER = """
import shmsched, sys
from shmsched.workers.echo import advance, answer
client = shmsched.Client(socket=sys.argv[1])
while True:
    try:
        session, h = client.open_session(), 0
        for token in range(50):
            h = advance(h, [token])
            raw = session.submit([token], sampling=None).result().logits
            assert raw.data.argmax() == answer(h, 1000)
            if token == 9:
                print("at work", flush=True)
        session.close()
    except shmsched.SchedulerDied:
        sys.exit(1)
    except shmsched.StepError:
        pass
"""


def test_f9_kills_at_random_moments_stop_nobody_since_no_lock_is_shared() -> None:
    rng = random.Random(9)
    with (
        # Slow enough that a random moment is most likely one in the middle of a batch.
        shmsched.launch(f"echo?vocab={VOCAB}&step_us=1000", engines=2) as cluster,
        shmsched.Control(cluster.socket) as control,
        cluster.client() as client,
        client_process(WORKER, cluster.socket) as bystander,
    ):
        for round_ in range(6):
            with client_process(WORKER, cluster.socket) as victim:
                assert line(victim) == "at work"
                steps = control.status()["ledger"]["completed"] + rng.randrange(200)
                wait_until(lambda n=steps: control.status()["ledger"]["completed"] >= n, "the victims to work on")
                if round_ % 2:
                    for engine in control.status()["engines"]:
                        os.kill(engine["pid"], signal.SIGKILL)
                else:
                    victim.kill()
                steps = control.status()["ledger"]["completed"] + 200
                wait_until(
                    lambda n=steps: control.status()["ledger"]["completed"] >= n, "the others to go on", DEADLINE
                )
            assert line(bystander) == "at work"
            wait_until(
                lambda: [e["state"] for e in control.status()["engines"]] == ["ready"] * 2, "both engines to be ready"
            )
            Decoding(client).go_on(10)
        assert bystander.poll() is None
        for pid in (cluster.pid, bystander.pid, *(e["pid"] for e in control.status()["engines"])):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            foreign = [m for m in maps if "/dev/shm/" in m and "/dev/shm/shmsched-" not in m]
            assert foreign == [], "only segments are shared; a semaphore would show here"


# --- F10 ----------------------------------------------------------------------------------------------------------------


def test_f10_a_stopped_client_costs_the_others_nothing_and_goes_on_when_it_is_continued() -> None:
    program = (
        "import os, shmsched, signal, sys\n"
        "from shmsched.workers.echo import advance, answer\n"
        "client = shmsched.Client(socket=sys.argv[1])\n"
        "session = client.open_session()\n"
        "futures = [session.submit([t % 1000]) for t in range(5000)]\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
        "h = 0\n"
        "for t, future in enumerate(futures):\n"
        "    h = advance(h, [t % 1000])\n"
        "    assert future.result(60).tokens.tolist() == [answer(h, 1000)]\n"
        "assert session.submit([1]).result(60).tokens.tolist() == [answer(advance(h, [1]), 1000)]\n"
        "print('all right', flush=True)\n"
    )
    with (
        shmsched.launch(f"echo?vocab={VOCAB}&step_us=200") as cluster,
        cluster.client() as client,
        client_process(program, cluster.socket) as stopped,
    ):
        wait_until(lambda: state_of(stopped.pid) == "T", "the client to stop")

        def unsent() -> int:
            return sum(c["unsent_bytes"] for c in cluster.status()["clients"] if c["pid"] == stopped.pid)

        wait_until(unsent, "the stopped client's socket to be full")
        Decoding(client).go_on(500)
        assert unsent() > 0
        assert state_of(stopped.pid) == "T"
        os.kill(stopped.pid, signal.SIGCONT)
        assert line(stopped) == "all right"
        assert stopped.wait(DEADLINE) == 0


def test_f10_a_peer_that_trickles_a_frame_byte_by_byte_costs_the_others_nothing() -> None:
    """In the middle of its hello, and in the middle of a frame of a client that was welcomed."""
    hello = framed(pack(frames.Hello(frames.MAGIC, frames.MAJOR, frames.MINOR, frames.Role.CLIENT)))
    opening = framed(pack(frames.OpenSession(1, 0, "", b"x" * 1000)))
    with (
        shmsched.launch(f"echo?vocab={VOCAB}") as cluster,
        cluster.client() as client,
        socket.socket(socket.AF_UNIX) as greeting,
        socket.socket(socket.AF_UNIX) as asking,
    ):
        decoding = Decoding(client)
        for peer in (greeting, asking):
            peer.settimeout(DEADLINE)
            peer.connect(str(cluster.socket))
        asking.sendall(hello)
        wait_until(lambda: len(cluster.status()["clients"]) == 2, "the peer to be welcomed")
        for i in range(len(opening)):
            greeting.sendall(hello[i : i + 1])
            asking.sendall(opening[i : i + 1])
            decoding.go_on(1)
        # Late, but whole: both were heard.
        wait_until(lambda: cluster.status()["engines"][0]["sessions"] == 2, "the trickled session to be open")
        assert len(cluster.status()["clients"]) == 3

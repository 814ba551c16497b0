"""Daemon, clients and engines that do not share a PID namespace, as in containers that share a directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli.commands import SCRIPT, environment
from cli.commands import shmsched as command

import shmsched
from shmsched.memory.segment import Segment, sweep
from shmsched.workers.echo import advance, answer

from processes.leftovers import shm_names, wait_until

VOCAB = 1000
DEADLINE = 30.0
APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def _refused() -> str:
    """Why no PID namespace can be made here; nothing where one can."""
    try:
        done = subprocess.run([*APART, "true"], capture_output=True, text=True, timeout=DEADLINE)
    except OSError as e:
        return str(e)
    return done.stderr.strip() if done.returncode else ""


pytestmark = pytest.mark.skipif(bool(why := _refused()), reason=f"no PID namespace can be made: {why}")


@contextmanager
def apart(home: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a PID namespace of its own, as its first process: it ends with the block."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*APART, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment(home), cwd=home
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


CLIENT = """
import sys, shmsched
from shmsched.workers.echo import advance, answer
with shmsched.Client(socket=sys.argv[1], wait=30) as client, client.open_session() as session:
    h = 0
    for token in range(20):
        h = advance(h, [token])
        kwargs = {} if token % 2 else {"sampling": None}
        response = session.submit([token], **kwargs).result(30)
        got = int(response.tokens[0]) if token % 2 else int(response.logits.data.argmax())
        assert got == answer(h, 1000), "a wrong answer"
    print("right", flush=True)
    sys.stdin.read()
"""


def works(socket: Path) -> None:
    with shmsched.Client(socket=socket, wait=DEADLINE) as client, client.open_session() as session:
        h = advance(0, [7])
        raw = session.submit([7], sampling=None).result(DEADLINE).logits
        assert raw is not None
        assert int(raw.data.argmax()) == answer(h, VOCAB)
        assert session.submit([8]).result(DEADLINE).tokens.tolist() == [answer(advance(h, [8]), VOCAB)]


def statuses(home: Path, socket: Path) -> str:
    done = command(home, "status", "--socket", str(socket))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_daemon_that_is_the_first_process_of_a_container_serves_those_outside_and_is_stopped_from_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    with apart(tmp_path, SCRIPT, "up", "--engine", f"echo?vocab={VOCAB}", "--socket", str(path)) as up:
        assert line(up) == f"ready {path}"
        works(path)
        assert "echo" in statuses(tmp_path, path)
        stopped = command(tmp_path, "stop", "--socket", str(path))
        assert (stopped.returncode, stopped.stderr) == (0, "")
        assert stopped.stdout.endswith("stopped\n")
        _, err = up.communicate(timeout=DEADLINE)
        assert up.returncode == 0
        assert "Traceback" not in err


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_client_that_the_daemon_does_not_see_works_and_its_end_is_seen(tmp_path: Path, end: str) -> None:
    """Each is in a namespace of its own: neither has a number for the other."""
    path = tmp_path / "s"
    with apart(tmp_path, SCRIPT, "up", "--engine", f"echo?vocab={VOCAB}", "--socket", str(path)) as up:
        assert line(up) == f"ready {path}"
        with apart(tmp_path, sys.executable, "-c", CLIENT, str(path)) as client:
            assert line(client) == "right"
            with shmsched.Control(path) as control:
                assert [c["pid"] for c in control.status()["clients"]] == [0]
                if end == "closed":
                    assert client.stdin is not None
                    client.stdin.close()
                    assert client.wait(DEADLINE) == 0
                else:
                    client.kill()
                wait_until(lambda: not control.status()["clients"], "the daemon to see the client's end")
        with apart(tmp_path, SCRIPT, "status", "--socket", str(path)) as status:
            out, err = status.communicate(timeout=DEADLINE)
            assert (status.returncode, err) == (0, "")
            assert "echo" in out
        with apart(tmp_path, SCRIPT, "stop", "--socket", str(path)) as stop:
            out, err = stop.communicate(timeout=DEADLINE)
            assert (stop.returncode, err) == (0, "")
            assert "in another PID namespace" in out
            assert out.endswith("stopped\n")
        up.communicate(timeout=DEADLINE)
        assert up.returncode == 0
        assert not path.exists()


def test_an_engine_that_the_daemon_does_not_see_serves_and_one_that_hangs_is_let_go(tmp_path: Path) -> None:
    path = tmp_path / "s"
    moody = f"{Path(__file__).parent.parent / 'processes' / 'engines.py'}:Moody"
    with apart(tmp_path, SCRIPT, "up", "--socket", str(path), "--step-timeout", "1") as up:
        assert line(up) == f"ready {path}"
        with (
            apart(tmp_path, SCRIPT, "engine", moody, "--socket", str(path)) as engine,
            shmsched.Client(socket=path) as client,
        ):
            wait_until(lambda: "echo" in client.models, "the engine to attach")
            works(path)
            with client.open_session() as session:
                h = advance(0, [1])
                assert session.submit([1]).result(DEADLINE).tokens.tolist() == [answer(h, VOCAB)]
                os.kill(inner(engine), signal.SIGSTOP)
                with pytest.raises(shmsched.EngineTimeout, match="in another PID namespace"):
                    session.submit([2], sampling=None).result(DEADLINE)
                os.kill(inner(engine), signal.SIGCONT)
                # It reads that it was let go, and ends by itself.
                engine.communicate(timeout=DEADLINE)
            wait_until(lambda: client._channel.arena._allocator.held == 0, "the row to come back")  # type: ignore[union-attr]
        assert command(tmp_path, "stop", "--socket", str(path)).returncode == 0
        up.communicate(timeout=DEADLINE)


def inner(process: subprocess.Popen[str]) -> int:
    """The process that ``unshare`` started, by its number here."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0])


MAKER = """
import os, posix_ipc, sys
from shmsched.memory import segment
unlink = posix_ipc.unlink_shared_memory
def later(name):
    print(name, flush=True)
    sys.stdin.readline()
    unlink(name)
segment.posix_ipc.unlink_shared_memory = later
made = segment.Segment.create(4096, "a test")
made.buffer[:4] = b"mine"
print("made", flush=True)
"""


def test_a_name_of_a_maker_that_lives_in_another_namespace_is_not_swept_and_one_that_was_killed_there_is(
    tmp_path: Path,
) -> None:
    with apart(tmp_path, sys.executable, "-c", MAKER) as maker:
        name = line(maker).removeprefix("/")
        assert name in shm_names()
        assert name not in sweep()
        assert name in shm_names()
        assert maker.stdin is not None
        maker.stdin.write("\n")
        maker.stdin.flush()
        assert line(maker) == "made"
        assert name not in shm_names()
    with apart(tmp_path, sys.executable, "-c", MAKER) as maker:
        name = line(maker).removeprefix("/")
        os.kill(inner(maker), signal.SIGKILL)
        maker.wait(DEADLINE)
        assert name in shm_names()
        assert name in sweep()


def test_a_segment_whose_name_somebody_removed_first_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import posix_ipc

    unlink = posix_ipc.unlink_shared_memory

    def too_late(name: str) -> None:
        unlink(name)
        unlink(name)

    monkeypatch.setattr(posix_ipc, "unlink_shared_memory", too_late)
    made = Segment.create(4096, "a test")
    made.buffer[:2] = b"ok"
    made.close_descriptor()

"""An engine ends with everything that it has started, however that had detached itself."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli.commands import SCRIPT, environment

import shmsched

from processes.engines import Parent
from processes.leftovers import wait_until
from processes.raising_engines import __file__ as RAISING_ENGINES
from processes.ways import ENGINES

DEADLINE = 30.0


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    return tmp_path / "pids"


class Watched:
    """Processes by pidfd: their numbers may become others'."""

    def __init__(self, pids: list[int]) -> None:
        self._fds = {pid: os.pidfd_open(pid) for pid in pids}

    def left(self) -> list[int]:
        poll = select.poll()
        for fd in self._fds.values():
            poll.register(fd, select.POLLIN)
        ended = {fd for fd, _ in poll.poll(0)}
        return [pid for pid, fd in self._fds.items() if fd not in ended]

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


def started(pids: Path, n: int = 1) -> list[int]:
    """By the n-th engine."""
    wait_until(
        lambda: pids.exists() and len(pids.read_text().splitlines()) >= n, f"engine {n} to have started", DEADLINE
    )
    return [int(pid) for pid in pids.read_text().splitlines()[n - 1].split()]


@contextmanager
def watched(*pids: int) -> Iterator[Watched]:
    watch = Watched(list(pids))
    try:
        yield watch
    finally:
        watch.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def engine_of(cluster: shmsched.Cluster) -> int:
    wait_until(lambda: cluster.status()["engines"], "the engine to be there", DEADLINE)
    return int(cluster.status()["engines"][0]["pid"])


@pytest.mark.parametrize("how", ["killed", "group killed", "keeper and engine killed"])
def test_what_a_killed_engine_started_ends_and_nothing_else(pids: Path, how: str) -> None:
    with (
        subprocess.Popen(["sleep", "600"], start_new_session=True) as bystander,
        shmsched.launch(f"{ENGINES}:Parent?pids={pids}", "echo?model=other") as cluster,
        cluster.client() as client,
        client.open_session(model="other") as other,
    ):
        engine = next(e["pid"] for e in cluster.status()["engines"] if e["model"] == "echo")
        keeper = parent_of(engine)
        first = started(pids)
        if how == "keeper and engine killed":
            # What has nothing of the engine's environment left cannot be told from anybody's.
            first = [first[0], first[2], first[3]]
        with watched(engine, keeper, *first) as watch, watched(bystander.pid, cluster.pid) as others:
            assert watch.left() == [engine, keeper, *first]
            if how == "keeper and engine killed":
                detached = started(pids)
                os.kill(keeper, signal.SIGKILL)
            elif how == "group killed":
                os.killpg(engine, signal.SIGKILL)
            else:
                os.kill(engine, signal.SIGKILL)
            wait_until(lambda: not watch.left(), "all of it to end", DEADLINE)
            assert others.left() == [bystander.pid, cluster.pid]
        if how == "keeper and engine killed":
            os.kill(detached[1], signal.SIGKILL)
            os.kill(detached[4], signal.SIGKILL)
        # Its successor's are another engine's.
        second = started(pids, 2)
        wait_until(lambda: len(cluster.status()["engines"]) == 2, "the engine to be there again", DEADLINE)
        with watched(*second) as watch:
            assert watch.left() == second
            other.submit([1]).result(DEADLINE)
            cluster.close()
            assert watch.left() == []
        bystander.kill()


@pytest.mark.prints("resource_tracker: There appear to be 1 leaked shared_memory objects", "warnings.warn")
@pytest.mark.parametrize("how", ["engine killed", "daemon killed", "closed"])
def test_what_cleans_up_after_a_dead_engine_may_do_so(tmp_path: Path, how: str) -> None:
    """multiprocessing's resource tracker: a helper too, which removes what the engine has left in /dev/shm."""
    file = tmp_path / "named"
    with shmsched.launch(f"{RAISING_ENGINES}:Sharing?named={file}") as cluster:
        segment = Path("/dev/shm", file.read_text().split()[0])
        assert segment.exists()
        engine = engine_of(cluster)
        with watched(engine, parent_of(engine)) as watch:
            if how == "closed":
                cluster.close()
            else:
                os.kill(engine if how == "engine killed" else cluster.pid, signal.SIGKILL)
            wait_until(lambda: not watch.left(), "the engine and its keeper to end", DEADLINE)
        assert not segment.exists()


@pytest.mark.prints("^Process ForkProcess-1:$", "KeyboardInterrupt")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_what_an_engine_starts_as_if_anybody_had_started_it(number: signal.Signals) -> None:
    """How an engine itself takes them is not handed on, to what it forks or to other programs: pool.terminate() works."""
    with (
        shmsched.launch(f"{RAISING_ENGINES}:Asking") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        assert session.submit([number]).result(DEADLINE).tokens.tolist() == [2]


def test_what_a_hanging_engine_started_ends_with_it(pids: Path) -> None:
    with (
        shmsched.launch(f"{ENGINES}:Parent?pids={pids}", step_timeout_s=0.5) as cluster,
        cluster.client() as client,
        client.open_session() as session,
        watched(engine_of(cluster), *started(pids)) as watch,
    ):
        with pytest.raises(shmsched.EngineTimeout):
            session.submit([Parent.HANG]).result(DEADLINE)
        wait_until(lambda: not watch.left(), "all of it to end", DEADLINE)


@pytest.mark.prints("no weights here", "did not start:$")
def test_what_an_engine_started_that_fails_to_start_ends_with_it(pids: Path) -> None:
    with pytest.raises(shmsched.EngineStartError, match="no weights here"):
        shmsched.launch(f"{ENGINES}:Parent?pids={pids}&crash=yes")
    for pid in started(pids):
        assert not Path(f"/proc/{pid}").exists()


def test_what_engines_started_ends_with_a_killed_daemon(pids: Path) -> None:
    with shmsched.launch(f"{ENGINES}:Parent?pids={pids}") as cluster:
        engine = engine_of(cluster)
        with watched(engine, parent_of(engine), *started(pids)) as watch:
            os.kill(cluster.pid, signal.SIGKILL)
            wait_until(lambda: not watch.left(), "all of it to end", DEADLINE)


def test_a_stopped_keeper_does_not_keep_a_hanging_engine_alive(pids: Path) -> None:
    with (
        shmsched.launch(f"{ENGINES}:Parent?pids={pids}", step_timeout_s=0.5) as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        engine = engine_of(cluster)
        with watched(engine, *started(pids)) as watch:
            os.kill(parent_of(engine), signal.SIGSTOP)
            with pytest.raises(shmsched.EngineTimeout):
                session.submit([Parent.HANG]).result(DEADLINE)
            wait_until(lambda: not watch.left(), "all of it to end", DEADLINE)


def test_signals_to_everybody_leave_it_to_the_daemon_when_its_engines_end(pids: Path) -> None:
    """As a service manager sends SIGTERM to a whole service, or a terminal an interrupt to a whole group."""
    with (
        shmsched.launch("echo?step_us=1000") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        engine = engine_of(cluster)
        keeper = parent_of(engine)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(keeper, number)
        os.kill(engine, signal.SIGINT)
        assert session.submit([1, 2]).result(DEADLINE).tokens.size == 1
        assert engine_of(cluster) == engine


def test_ctrl_c_in_a_terminal_reaches_the_daemon_alone(tmp_path: Path, pids: Path) -> None:
    """The daemon is in the terminal's group; its engines are not, and end in order."""
    with subprocess.Popen(
        [SCRIPT, "up", "--engine", f"{ENGINES}:Parent?pids={pids}"],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as up:
        assert up.stdout is not None
        assert up.stdout.readline().startswith("ready ")
        with watched(*started(pids)) as watch:
            os.killpg(up.pid, signal.SIGINT)
            _, err = up.communicate(timeout=DEADLINE)
            assert up.returncode == 0
            assert watch.left() == []
    assert "Traceback" not in err


def _may_unshare() -> bool:
    return not subprocess.run(["unshare", "-pf", "--mount-proc", "true"], check=False, capture_output=True).returncode


@pytest.mark.skipif(not _may_unshare(), reason="needs a PID namespace of one's own")
def test_as_pid_1_it_reaps_the_orphans_that_it_is_given(tmp_path: Path) -> None:
    script = f"(sleep 0.1 & sleep 0.2 & sleep 0.3 &); exec {SCRIPT} up --engine echo"
    with subprocess.Popen(
        ["unshare", "-pf", "--kill-child", "--mount-proc", "sh", "-c", script],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as unshare:
        assert unshare.stdout is not None
        assert unshare.stdout.readline().startswith("ready ")
        (daemon,) = children_of(unshare.pid)
        wait_until(lambda: len(children_of(daemon)) == 1, "nobody but the keeper to be left", DEADLINE)
        (keeper,) = children_of(daemon)
        (engine,) = children_of(keeper)
        # And it still knows how its own end.
        os.kill(engine, signal.SIGSEGV)
        wait_until(lambda: children_of(daemon) not in ([keeper], []), "the engine to be started again", DEADLINE)
        os.kill(daemon, signal.SIGTERM)
        _, err = unshare.communicate(timeout=DEADLINE)
    assert "Traceback" not in err


def children_of(pid: int) -> list[int]:
    """Zombies too."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if parent_of(int(directory.name)) == pid:
                found.append(int(directory.name))
        except OSError:
            continue
    return found

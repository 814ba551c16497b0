"""The system allows a process too little: whoever lacks something is told so, with the numbers, and the others go on."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from cli.commands import running

import shmsched
from shmsched.workers.echo import advance, answer

from faults.limits import address_space, limited, no_further_process, with_descriptors_left
from processes.leftovers import wait_until

VOCAB = 1000
DEADLINE = 30.0
ARENA = 64 << 20


@contextmanager
def short_of(pid: int, what: str) -> Iterator[None]:
    """The process lacks something for an arena until the end of the block."""
    if what == "address space":
        with limited(pid, resource.RLIMIT_AS, address_space(pid) + ARENA // 2):
            yield
    else:
        with limited(pid, resource.RLIMIT_NOFILE, with_descriptors_left(pid, int(what.split()[0]))):
            yield


class Checked:
    """A session whose every answer is compared with echo's."""

    def __init__(self, client: shmsched.Client) -> None:
        self.session = client.open_session()
        self._h = 0

    def raw(self, token: int) -> None:
        logits = self.session.submit([token], sampling=None).result(DEADLINE).logits
        assert logits is not None
        self._h = advance(self._h, [token])
        assert int(logits.data.argmax()) == answer(self._h, VOCAB)

    def decode(self, token: int) -> None:
        tokens = self.session.submit([token]).result(DEADLINE).tokens
        self._h = advance(self._h, [token])
        assert tokens.tolist() == [answer(self._h, VOCAB)]


# The descriptor that comes is lost, or the mapping lacks one of its own, or there is no address space for it.
LACKING = ["0 descriptors", "1 descriptor", "address space"]


@pytest.mark.parametrize("what", LACKING)
def test_an_engine_that_cannot_have_an_arena_fails_that_clients_raw_steps_and_goes_on(what: str) -> None:
    with (
        shmsched.launch(f"echo?vocab={VOCAB}") as cluster,
        cluster.client(arena_bytes=ARENA) as first,
        cluster.client(arena_bytes=ARENA) as second,
        cluster.client(arena_bytes=ARENA) as third,
    ):
        ours, theirs, others = Checked(first), Checked(second), Checked(third)
        ours.raw(1)
        theirs.decode(2)
        engine = cluster.status()["engines"][0]["pid"]
        with short_of(engine, what):
            for asking in (theirs, others, theirs):
                with pytest.raises(
                    shmsched.SharedMemoryError, match=r"arena.*(descriptors that process|address space)"
                ):
                    asking.raw(3)
                ours.raw(4)
                asking.decode(5)
            # What follows a raw step in its session goes with it, what precedes it does not.
            before = theirs.session.submit([6])
            raw = theirs.session.submit([7], sampling=None)
            after = theirs.session.submit([8])
            assert before.result(DEADLINE).tokens.size == 1
            for future in (raw, after):
                with pytest.raises(shmsched.SharedMemoryError):
                    future.result(DEADLINE)
            theirs._h = advance(theirs._h, [6])
        for everybody in (theirs, others, ours):
            everybody.raw(9)
            everybody.decode(10)
        status = cluster.status()
        assert [e["pid"] for e in status["engines"]] == [engine]
        assert status["workers"][0]["restarts"] == 0


@pytest.mark.parametrize("what", LACKING)
def test_a_client_that_cannot_have_its_arena_is_told_at_the_step_and_goes_on(what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, what],
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert (done.stdout, done.stderr) == ("told\ntold\nasync told\ndone\n", "")


CLIENT = """
import asyncio, os, sys
import shmsched
from faults.test_shortages import ARENA, DEADLINE, VOCAB, Checked, short_of

what = sys.argv[1]

async def asynchronous(socket):
    async with shmsched.AsyncClient(socket=socket, arena_bytes=ARENA) as client, client.open_session() as session:
        with short_of(os.getpid(), what):
            try:
                await session.submit([1], sampling=None)
            except shmsched.SharedMemoryError:
                print("async told")
        assert (await session.submit([1])).tokens.size == 1
        assert (await session.submit([1], sampling=None)).logits is not None

with shmsched.launch(f"echo?vocab={VOCAB}") as cluster, cluster.client(arena_bytes=ARENA) as client:
    checked = Checked(client)
    checked.decode(1)
    with short_of(os.getpid(), what):
        for _ in range(2):
            try:
                checked.raw(2)
            except shmsched.SharedMemoryError as e:
                assert "descriptors that process" in str(e) or "address space" in str(e), e
                print("told")
            checked.decode(3)
    checked.raw(4)
    asyncio.run(asynchronous(cluster.socket))
print("done")
"""


def test_a_daemon_short_of_descriptors_at_a_first_raw_step_says_so_and_goes_on() -> None:
    told: list[str] = []
    with (
        shmsched.launch(f"echo?vocab={VOCAB}") as cluster,
        cluster.client() as bystander,
    ):
        other = Checked(bystander)
        other.raw(1)
        for left in range(4):
            with cluster.client(arena_bytes=ARENA) as client:
                checked = Checked(client)
                checked.decode(1)
                with limited(cluster.pid, resource.RLIMIT_NOFILE, with_descriptors_left(cluster.pid, left)):
                    try:
                        checked.raw(2)
                    except shmsched.SharedMemoryError as e:
                        told.append(str(e))
                    checked.decode(3)
                    other.raw(4)
                checked.raw(5)
    assert told
    assert all("descriptors that process" in message for message in told), told


def test_with_few_descriptors_every_client_works_or_is_told_that_and_none_is_let_go_without_a_word(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with running(tmp_path, "up", "--engine", f"echo?vocab={VOCAB}", "--socket", str(path)) as up, ExitStack() as stack:
        up.read_until(b"ready")
        resource.prlimit(up.process.pid, resource.RLIMIT_NOFILE, (128, before[1]))
        working: list[Checked] = []
        told: list[str] = []
        for i in range(45):
            try:
                checked = Checked(stack.enter_context(shmsched.Client(socket=path, arena_bytes=1 << 20)))
                checked.decode(1)
                working.append(checked)
                checked.raw(i)
            except (shmsched.SystemLimit, shmsched.SharedMemoryError) as e:
                told.append(str(e))
                if len(told) == 3:
                    break
        assert [("128 descriptors that process" in message) for message in told] == [True] * 3, told
        assert len(working) >= 20
        for checked in working:
            checked.decode(2)
        for checked in working[:20]:
            checked.raw(3)
        stack.close()
        wait_until(lambda: len(list(Path(f"/proc/{up.process.pid}/fd").iterdir())) < 40, "the daemon to let go of all")
        with shmsched.Client(socket=path) as client:
            Checked(client).raw(1)
        up.process.terminate()
        assert up.wait() == 0
        assert "Traceback" not in up.err


def test_a_daemon_without_address_space_refuses_clients_in_words_and_goes_on() -> None:
    with shmsched.launch(f"echo?vocab={VOCAB}") as cluster, cluster.client() as bystander:
        other = Checked(bystander)
        with (
            limited(cluster.pid, resource.RLIMIT_AS, address_space(cluster.pid) + 4096),
            pytest.raises(shmsched.SharedMemoryError, match=r"the address space of process \d+ .*ulimit -v"),
        ):
            # Memory that it has freed before is there to be used.
            for _ in range(50):
                cluster.client()
        other.raw(1)
        with cluster.client() as client:
            Checked(client).raw(1)


@pytest.mark.parametrize("what", ["descriptors", "processes"])
def test_an_engine_that_cannot_be_started_again_for_now_is_started_once_it_can(
    what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with shmsched.launch(f"echo?vocab={VOCAB}") as cluster, cluster.client() as client:
        Checked(client).raw(1)
        engine = cluster.status()["engines"][0]["pid"]
        lack = (
            limited(cluster.pid, resource.RLIMIT_NOFILE, 3)  # what the dead engine gives back is not enough either
            if what == "descriptors"
            else no_further_process(cluster.pid)
        )
        with lack:
            os.kill(engine, signal.SIGKILL)
            said = ""
            deadline = time.monotonic() + DEADLINE
            while said.count("cannot be started for now") < 3:
                assert time.monotonic() < deadline, f"waited in vain for it to be tried again: {said}"
                time.sleep(0.05)
                said += capfd.readouterr().err
        wanted = "descriptors that process" if what == "descriptors" else "no further process or thread"
        assert wanted in said
        with client.open_session(timeout=DEADLINE):
            pass
        Checked(client).raw(2)
        (worker,) = cluster.status()["workers"]
        assert worker["state"] == "attached"


@pytest.mark.prints("Cannot allocate memory", r"short\.py.* did not start:")
def test_an_engine_that_finds_too_little_as_it_starts_again_is_not_given_up(tmp_path: Path) -> None:
    """More often than five times in a row, which ends one that dies of itself."""
    program = tmp_path / "short.py"
    program.write_text(SHORT)
    with shmsched.launch(f"{program}:Short?path={tmp_path}") as cluster, cluster.client() as client:
        (tmp_path / "lack").touch()
        os.kill(cluster.status()["engines"][0]["pid"], signal.SIGKILL)
        wait_until(
            lambda: (tmp_path / "tries").exists() and len((tmp_path / "tries").read_text()) >= 6,
            "six tries to start",
            DEADLINE,
        )
        assert [w["state"] for w in cluster.status()["workers"]] != ["given up"]
        (tmp_path / "lack").unlink()
        with client.open_session(timeout=DEADLINE) as session:
            assert session.submit([1]).result(DEADLINE).tokens.size == 1


SHORT = """
import errno, os, pathlib
from shmsched.workers.echo import Echo

class Short(Echo):
    def __init__(self, *, path: str) -> None:
        super().__init__(vocab=1000)
        self.path = pathlib.Path(path)

    def start(self, limits):
        if (self.path / "lack").exists():
            with (self.path / "tries").open("a") as tries:
                tries.write(".")
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        super().start(limits)
"""

"""The system allows a process too little: whoever lacks something is told so, with the numbers, and the others go on."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from cli.commands import running

import shmsched
from shmsched.workers.echo import advance, answer

from processes.leftovers import wait_until

VOCAB = 1000
DEADLINE = 30.0
ARENA = 64 << 20


@contextmanager
def limited(pid: int, limit: int, most: int) -> Iterator[None]:
    """The process is allowed ``most`` until the end of the block."""
    soft, hard = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (most, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, limit, (soft, hard))


def with_descriptors_left(pid: int, n: int) -> int:
    """The limit that leaves the process ``n`` descriptors."""
    listed = list(Path(f"/proc/{pid}/fd").iterdir())
    # Our own listing is over by now.
    used = {int(path.name) for path in listed if path.is_symlink()}
    free = [fd for fd in range(max(used) + n + 2) if fd not in used]
    return free[n]


def address_space(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


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

"""What the stress tool does to processes: each shortage is there while it lasts, and over when it is over."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from shmsched.tools.load.shortages import (
    NotInjected,
    PidsCgroup,
    all_stopped,
    limited,
    little_address_space,
    next_child_in_pid_namespace,
    no_descriptors,
)

from processes.leftovers import wait_until

TRIES = """
import mmap, os, sys
for line in sys.stdin:
    try:
        if line == "open\\n":
            os.close(os.open("/", os.O_RDONLY))
        elif line == "map\\n":
            mmap.mmap(-1, 64 << 20).close()
        elif os.fork() == 0:
            os._exit(0)
        else:
            os.wait()
        print("did it", flush=True)
    except OSError as e:
        print(e.strerror, flush=True)
"""


class Subject:
    """A process that tries something when told to."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRIES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.tries("open") == "did it"

    @property
    def pid(self) -> int:
        return self.process.pid

    def tries(self, what: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture
def subject() -> Iterator[Subject]:
    subject = Subject()
    yield subject
    subject.process.kill()
    subject.process.communicate()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_that_runs_short_can_go_on_afterwards(subject: Subject) -> None:
    shortages: list[tuple[AbstractContextManager[None], str, str]] = [
        (no_descriptors(subject.pid), "open", "Too many open files"),
        (little_address_space(subject.pid), "map", "Cannot allocate memory"),
    ]
    for shortage, what, why in shortages:
        with shortage:
            assert subject.tries(what) == why
        assert subject.tries(what) == "did it"


def test_a_child_that_inherited_the_limit_is_given_it_back() -> None:
    parent = subprocess.Popen(["sh", "-c", "read line; sleep 60 & wait"], stdin=subprocess.PIPE, start_new_session=True)
    try:
        assert parent.stdin is not None
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        limits = Path(f"/proc/{parent.pid}/limits")
        before = [line for line in limits.read_text().splitlines() if "open files" in line]
        with limited(parent.pid, resource.RLIMIT_NOFILE, 50):
            parent.stdin.write(b"\n")
            parent.stdin.flush()
            wait_until(children.read_text, "the child to be started")
        limits = Path(f"/proc/{int(children.read_text())}/limits")
        assert [line for line in limits.read_text().splitlines() if "open files" in line] == before
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()


def test_all_are_stopped_and_go_on(subject: Subject) -> None:
    other = Subject()
    try:
        with all_stopped([subject.pid, other.pid]):
            wait_until(lambda: state(subject.pid) + state(other.pid) == "TT", "both to be stopped")
        assert subject.tries("open") == other.tries("open") == "did it"
    finally:
        other.process.kill()
        other.process.communicate()


def test_process_numbers_run_out_in_a_cgroup_of_ours(subject: Subject) -> None:
    try:
        cgroup = PidsCgroup({subject.pid})
    except NotInjected as e:
        pytest.skip(str(e))
    with cgroup.exhausted():
        assert subject.tries("fork") == "Resource temporarily unavailable"
    assert subject.tries("fork") == "did it"
    subject.process.kill()
    subject.process.wait()
    cgroup.close()
    assert not list(Path("/sys/fs/cgroup").glob(f"**/shmsched-stress-{os.getpid()}"))


def test_one_child_is_alone_in_a_pid_namespace_and_the_next_is_not() -> None:
    says = [sys.executable, "-c", "import os; print(os.getpid())"]
    try:
        with next_child_in_pid_namespace():
            apart = subprocess.run(says, capture_output=True, text=True)
    except NotInjected as e:
        pytest.skip(str(e))
    assert apart.stdout == "1\n"
    assert int(subprocess.run(says, capture_output=True, text=True).stdout) > 1


def test_dev_shm_is_filled_and_emptied_in_one_of_our_own() -> None:
    """In a process of its own, whose /dev/shm it is from then on."""
    program = """
import os
import resource
from shmsched import SharedMemoryError
from shmsched.memory.segment import Segment
from shmsched.tools.load.shortages import NotInjected, filled_shm, own_shm
try:
    own_shm()
except NotInjected as e:
    raise SystemExit(f"skip: {e}")
with filled_shm():
    assert os.listdir("/dev/shm") == [], "what fills it has no name"
    try:
        Segment.create(1 << 20, "a test")
    except SharedMemoryError as e:
        assert "/dev/shm has" in str(e), e
    else:
        raise AssertionError("there was room")
Segment.create(1 << 20, "a test")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if run.stderr.startswith("skip: "):
        pytest.skip(run.stderr)
    assert run.returncode == 0, run.stderr

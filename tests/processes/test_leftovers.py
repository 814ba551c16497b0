"""The check that others rely on: it sees what a test leaves, waits for what is ending, and names it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import posix_ipc
import pytest

from processes.leftovers import nothing_left, our_processes, shm_names, wait_until

SLEEPER = [sys.executable, "-c", "import sys; sys.stdin.read()"]
ORPHAN = """
import subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True, stdout=subprocess.DEVNULL
)
print(child.pid)
child.returncode = 0  # it is not ours to wait for
"""


def test_a_child_that_stays_is_named_and_killed() -> None:
    with subprocess.Popen(SLEEPER, stdin=subprocess.PIPE) as sleeper:
        before = our_processes()
        assert any(process.pid == sleeper.pid for process in before)
    with pytest.raises(AssertionError, match=r"waited 0\.1 s for processes .*sys\.stdin\.read"), nothing_left(0.1):
        sleeper = subprocess.Popen(SLEEPER, stdin=subprocess.PIPE)
    assert sleeper.wait(10) == -9
    assert sleeper.stdin is not None
    sleeper.stdin.close()


def test_an_orphan_in_a_session_of_its_own_is_ours() -> None:
    with pytest.raises(AssertionError, match=r"signal\.pause"), nothing_left(0.1):
        found = subprocess.run([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, check=True, timeout=30)
    pid = int(found.stdout)
    wait_until(lambda: pid not in {process.pid for process in our_processes()}, f"process {pid} to end")


def test_a_forked_child_is_ours() -> None:
    read, write = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=os.read, args=(read, 1))
    with pytest.raises(AssertionError, match="processes that the test left"), nothing_left(0.1):
        child.start()
    child.join(10)
    assert child.exitcode == -9
    os.close(read)
    os.close(write)


def test_what_is_ending_is_waited_for() -> None:
    with nothing_left():
        ender = subprocess.Popen([sys.executable, "-c", "import select; select.select([], [], [], 0.2)"])
    assert ender.wait(10) == 0


def test_a_name_in_dev_shm_is_seen() -> None:
    # Not of the form that a daemon elsewhere on the machine would sweep.
    name = f"shmsched-test-{os.getpid()}"
    try:
        with pytest.raises(AssertionError, match=name), nothing_left(0.1):
            posix_ipc.SharedMemory("/" + name, flags=posix_ipc.O_CREX, mode=0o600, size=1).close_fd()
    finally:
        posix_ipc.unlink_shared_memory("/" + name)
    assert name not in shm_names()


def test_a_process_from_before_and_its_children_are_not_ours_to_judge() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys\nsys.stdin.readline()\nsubprocess.run(sys.argv[1:])", *SLEEPER],
        stdin=subprocess.PIPE,
    )
    assert parent.stdin is not None
    with nothing_left(0.1):
        before = len(our_processes())
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        wait_until(lambda: len(our_processes()) > before, "the grandchild to start")
    parent.stdin.close()
    assert parent.wait(10) == 0

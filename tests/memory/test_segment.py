"""Segments: no name outlives their making, nothing is left of one that cannot be made, mappings outlive descriptors."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import posix_ipc
import pytest

from shmsched.errors import SharedMemoryError
from shmsched.memory.segment import Segment, start_time, sweep

from processes.leftovers import shm_names

pytestmark = pytest.mark.usefixtures("no_leftovers")


def descriptors() -> set[str]:
    """What this process's open descriptors of shared memory refer to."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = f"{link.name} {link.readlink()}"
        except FileNotFoundError:
            continue
        if "/dev/shm/" in target:
            found.add(target)
    return found


def own_names() -> list[str]:
    return [name for name in shm_names() if name.startswith(f"shmsched-{os.getpid()}-")]


def total_shm() -> int:
    space = os.statvfs("/dev/shm")
    return space.f_blocks * space.f_frsize


def test_the_name_is_gone_at_once_and_the_memory_is_zeroed_and_ours() -> None:
    segment = Segment.create(10_000, "a test")
    assert own_names() == []
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{segment.fd}")
    assert len(segment.buffer) == segment.size == 10_000
    assert segment.buffer[:] == bytes(10_000)
    assert os.fstat(segment.fd).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(segment.fd)
    segment.close_descriptor()


def test_its_memory_is_reserved_when_it_is_made() -> None:
    segment = Segment.create(1 << 20, "a test")
    assert os.fstat(segment.fd).st_blocks * 512 >= 1 << 20, "untouched pages would be a SIGBUS later"
    segment.close_descriptor()


def test_what_does_not_fit_is_refused_with_the_sizes_and_leaves_nothing() -> None:
    before = descriptors()
    size = total_shm() + (1 << 30)
    with pytest.raises(SharedMemoryError, match=r"the arena of client 7 needs [\d,]+ bytes") as e:
        Segment.create(size, "the arena of client 7")
    assert f"{size:,}" in str(e.value)
    assert f"of {total_shm():,}" in str(e.value)
    assert "free" in str(e.value)
    assert descriptors() == before
    assert own_names() == []


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_that_is_none_is_refused_and_leaves_nothing(size: int) -> None:
    before = descriptors()
    with pytest.raises(SharedMemoryError, match="a test"):
        Segment.create(size, "a test")
    assert descriptors() == before


def test_attaching_to_a_file_that_is_too_small_is_refused_and_the_descriptor_is_closed() -> None:
    segment = Segment.create(4096, "a test")
    fd = os.dup(segment.fd)
    with pytest.raises(SharedMemoryError, match="has 4096 bytes; its layout needs 4097"):
        Segment(fd, 4097)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    segment.close_descriptor()


def test_a_size_that_cannot_be_mapped_is_an_error_of_ours_and_the_descriptor_is_closed() -> None:
    most = 2**63 - 4096
    fd = os.memfd_create("sparse")
    os.ftruncate(fd, most)
    with pytest.raises(SharedMemoryError, match=f"{most:,} bytes cannot be mapped"):
        Segment(fd, most)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_two_mappings_are_one_memory_and_outlive_the_descriptor() -> None:
    maker = Segment.create(4096, "a test")
    user = Segment(os.dup(maker.fd), 4096)
    for segment in (maker, user):
        segment.close_descriptor()
        segment.close_descriptor()
        assert segment.fd == -1
    maker.buffer[100:105] = b"hello"
    assert user.buffer[100:105] == b"hello"


def test_a_view_keeps_the_mapping() -> None:
    segment = Segment.create(4096, "a test")
    segment.close_descriptor()
    view = memoryview(segment.buffer)[10:20]
    del segment
    gc.collect()
    view[0] = 7
    assert view[0] == 7


def test_all_memory_goes_with_the_last_view() -> None:
    before = descriptors()
    segment = Segment.create(4096, "a test")
    segment.close_descriptor()
    del segment
    gc.collect()
    assert descriptors() == before


def test_attaching_never_owns() -> None:
    """F2: the exit of a process that has attached changes nothing for the others, and prints nothing."""
    segment = Segment.create(4096, "a test")
    code = (
        "import sys; from shmsched.memory.segment import Segment\n"
        "s = Segment(int(sys.argv[1]), 4096); s.buffer[:2] = b'ok'"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(segment.fd)],
        pass_fds=[segment.fd],
        capture_output=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert segment.buffer[:3] == b"ok\0"
    segment.close_descriptor()


# --- what a kill in the middle of create leaves ---------------------------------------------------------------------------


def make(name: str) -> str:
    posix_ipc.SharedMemory("/" + name, flags=posix_ipc.O_CREX, mode=0o600, size=1).close_fd()
    return name


def remove(*names: str) -> None:
    for name in names:
        try:
            posix_ipc.unlink_shared_memory("/" + name)
        except posix_ipc.ExistentialError:
            pass


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    return child.pid


def test_sweep_removes_the_names_of_makers_that_are_gone_and_no_others() -> None:
    me, started = os.getpid(), start_time(os.getpid())
    assert started > 0
    gone = [f"shmsched-{dead_pid()}-{started}-0", f"shmsched-{me}-{started - 1}-901"]
    kept = [f"shmsched-{me}-{started}-900", f"shmsched-{dead_pid()}", f"shmsched-{dead_pid()}-1-2-notes"]
    try:
        for name in gone + kept:
            make(name)
        # A daemon elsewhere on the machine may have swept before us; what is kept, nobody may sweep.
        assert not set(kept) & set(sweep())
        assert not set(gone) & shm_names()
        assert set(kept) <= shm_names()
        assert not set(gone) & set(sweep())
    finally:
        remove(*gone, *kept)


def test_the_start_time_of_a_process_with_parentheses_in_its_name() -> None:
    code = (
        "import ctypes; ctypes.CDLL(None).prctl(15, b'a) S 1 (b', 0, 0, 0)\n"
        "from shmsched.memory.segment import start_time; import os\n"
        "print(start_time(os.getpid()), start_time(os.getppid()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=True)
    own, parent = map(int, done.stdout.split())
    assert parent == start_time(os.getpid())
    assert own >= parent


def test_there_is_no_start_time_of_a_process_that_is_gone() -> None:
    assert start_time(dead_pid()) == 0


def sweep_as(uid: int, name: str) -> None:
    os.setgid(uid)
    os.setuid(uid)
    assert name not in sweep()


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's name takes another user")
def test_the_names_of_other_users_do_not_stop_a_daemon_from_starting() -> None:
    name = f"shmsched-{dead_pid()}-1-0"
    try:
        make(name)
        child = multiprocessing.get_context("fork").Process(target=sweep_as, args=(65534, name))
        child.start()
        child.join(30)
        assert child.exitcode == 0
    finally:
        remove(name)

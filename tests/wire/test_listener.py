"""The daemon's socket: one daemon at a time, whatever the last one left; and nothing that is not ours is touched."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shmsched.errors import DaemonRunning, SocketPathError
from shmsched.wire.listener import Listener, default_socket

from processes.leftovers import DEADLINE_S

pytestmark = pytest.mark.usefixtures("no_leftovers")

HOLD = """
import sys
from pathlib import Path
from shmsched.wire.listener import Listener
listener = Listener(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
listener.close()
"""


def holder(path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def finish(process: subprocess.Popen[bytes], status: int) -> None:
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == status


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(str(path))
        except OSError:
            return False
        return True


def test_it_listens_for_this_user_only_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "s"
    before = os.umask(0)
    try:
        listener = Listener(path)
        assert os.umask(0) == 0, "the process's umask is not its to change"
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert answers(path)
    listener.close()
    assert list(path.parent.iterdir()) == []


def test_a_second_daemon_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "s"
    process = holder(path)
    with pytest.raises(DaemonRunning, match=f"pid {process.pid} has {path}; stop it with"):
        Listener(path)
    assert answers(path), "the refused one took the first one's socket away"
    finish(process, 0)
    Listener(path).close()


def test_a_killed_daemon_does_not_stand_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "s"
    process = holder(path)
    process.send_signal(signal.SIGKILL)
    finish(process, -signal.SIGKILL)
    assert path.is_socket()
    assert not answers(path)
    listener = Listener(path)
    assert answers(path)
    listener.close()


def test_a_forked_child_of_the_first_does_not_get_in_twice(tmp_path: Path) -> None:
    """In one process too: the lock belongs to the open file, not to the process."""
    listener = Listener(tmp_path / "s")
    with pytest.raises(DaemonRunning, match=f"pid {os.getpid()} "):
        Listener(tmp_path / "s")
    listener.close()


def test_a_lock_file_that_lost_its_name_excludes_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first leaves between the second one's opening of the lock file and its locking of it."""
    path = tmp_path / "s"
    leaving = [Listener(path)]
    lock = fcntl.flock

    def lock_late(fd: int, operation: int) -> None:
        while leaving:
            leaving.pop().close()
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    listener = Listener(path)
    with pytest.raises(DaemonRunning):
        Listener(path)
    assert answers(path)
    listener.close()


def test_never_two_at_once(tmp_path: Path) -> None:
    """Each leaves as another comes: the lock file's name goes and comes back, and the old one excludes nobody."""
    path = tmp_path / "s"
    holding = threading.Lock()
    held, errors = [0] * 4, []

    def compete(i: int) -> None:
        for _ in range(300):
            try:
                listener = Listener(path)
            except DaemonRunning:
                continue
            except BaseException as e:
                errors.append(e)
                return
            if not holding.acquire(blocking=False):
                errors.append(AssertionError("two have the socket"))
                return
            held[i] += 1
            holding.release()
            listener.close()

    threads = [threading.Thread(target=compete, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert sum(held) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_no_socket_is_not_deleted(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "notes.txt"
    if kind == "file":
        path.write_text("dear diary")
    else:
        path.mkdir()
    with pytest.raises(SocketPathError, match="exists and is not a socket"):
        Listener(path)
    assert path.is_dir() if kind == "directory" else path.read_text() == "dear diary"
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    if kind == "file":
        path.unlink()
    else:
        path.rmdir()
    Listener(path).close()


def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    path = tmp_path / ("s" * (107 - len(str(tmp_path)) - 1))
    Listener(path).close()
    with pytest.raises(SocketPathError, match=f"has 108 bytes; a Unix socket takes at most 107: {path}s"):
        Listener(path.with_name(path.name + "s"))
    # Bytes count, not characters.
    with pytest.raises(SocketPathError, match="at most 107"):
        Listener(path.with_name(path.name[:-1] + "é"))


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(SocketPathError, match=f"can be written by others .mode {mode:o}.; chmod it to 700"):
        Listener(directory / "s")
    assert list(directory.iterdir()) == []
    directory.chmod(0o1777)
    Listener(directory / "s").close()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a directory away takes root")
@pytest.mark.parametrize("mode", [0o700, 0o1777])
def test_a_directory_of_another_user_is_refused(tmp_path: Path, mode: int) -> None:
    """The sticky bit does not help: the directory's owner may still put another socket in place."""
    directory = tmp_path / "d"
    directory.mkdir()
    directory.chmod(mode)
    os.chown(directory, 65534, 65534)
    with pytest.raises(SocketPathError, match="belongs to user 65534"):
        Listener(directory / "s")


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(SocketPathError, match="not a directory|cannot be used"):
        Listener(tmp_path / "f" / "s")


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "s.lock").symlink_to(victim)
    with pytest.raises(SocketPathError, match=r"cannot open .*s\.lock"):
        Listener(tmp_path / "s")
    assert victim.read_text() == "precious"


def test_the_default_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMSCHED_SOCKET", str(tmp_path / "mine"))
    assert default_socket() == tmp_path / "mine"
    monkeypatch.delenv("SHMSCHED_SOCKET")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_socket() == tmp_path / "shmsched" / "default.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert default_socket() == tmp_path / f"shmsched-{os.geteuid()}" / "default.sock"

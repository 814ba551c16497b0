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
from shmsched.wire.listener import Listener, sweep_sockets
from shmsched.wire.socket_lock import SocketLock
from shmsched.wire.socket_path import default_socket, private_directory

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
    path = tmp_path / "s"
    before = os.umask(0)
    try:
        listener = Listener(path)
        assert os.umask(0) == 0, "the process's umask is not its to change"
    finally:
        os.umask(before)
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
    with pytest.raises(SocketPathError, match="exists and is not a socket" if kind == "file" else "names a directory"):
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
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    mine = tmp_path / f"shmsched-{os.geteuid()}"
    assert default_socket() == mine / "default.sock"
    Listener(default_socket()).close()
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    assert default_socket() == Path(f"/tmp/shmsched-{os.geteuid()}/default.sock")


def test_a_directory_that_somebody_mistyped_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(SocketPathError, match="No such file or directory. Make it, with mode 700"):
        Listener(tmp_path / "mistyped" / "s")
    assert list(tmp_path.iterdir()) == []


def test_what_a_cleaner_removed_comes_back_and_whoever_waited_is_served(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = Listener(path)
    with socket.socket(socket.AF_UNIX) as early, socket.socket(socket.AF_UNIX) as late:
        early.connect(str(path))
        path.unlink()
        (tmp_path / "s.lock").unlink()
        number = listener.sock.fileno()
        assert listener.restore()
        assert not listener.restore(), "there is nothing more to do"
        assert listener.sock.fileno() == number
        late.connect(str(path))
        found = [listener.accept(), listener.accept()]
        assert None not in found
        for connection in found:
            assert connection is not None
            connection.close()
        assert listener.accept() is None
    with pytest.raises(DaemonRunning):
        Listener(path)
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_without_the_lock_whoever_listens_has_the_path(tmp_path: Path) -> None:
    path = tmp_path / "s"
    process = holder(path)
    (tmp_path / "s.lock").unlink()
    with pytest.raises(DaemonRunning, match=f"pid {process.pid} has {path}"):
        Listener(path)
    assert answers(path)
    finish(process, 0)
    assert list(tmp_path.iterdir()) == []


def test_whoever_leaves_unlinks_nothing_of_his_successors(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = Listener(path)
    path.unlink()
    (tmp_path / "s.lock").unlink()
    second = Listener(path)
    with pytest.raises(DaemonRunning):
        first.restore()
    first.close()
    assert answers(path)
    with pytest.raises(DaemonRunning):
        Listener(path)
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_the_socket_of_a_successor_without_a_lock_is_not_unlinked_either(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = Listener(path)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        first.close()
        assert answers(path)


def test_who_only_looks_is_waited_for(tmp_path: Path) -> None:
    """Somebody who sweeps has the lock for a moment."""
    path = tmp_path / "s"
    looking = SocketLock(path)
    threading.Timer(0.05, looking.release).start()
    Listener(path).close()


def test_what_is_looked_at_is_kept_fresh(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir(mode=0o700)
    listener = Listener(directory / "s")
    for path in (*listener.files, directory):
        os.utime(path, (1, 1))
    listener.freshen()
    for path in (*listener.files, directory):
        assert path.stat().st_mtime > 1
        assert path.stat().st_atime > 1
    listener.close()


def test_a_sweep_removes_what_the_dead_left_and_leaves_the_living(tmp_path: Path) -> None:
    dead, living, unlocked = (tmp_path / f"launch-{name}.sock" for name in ("dead", "living", "unlocked"))
    process = holder(dead)
    process.kill()
    finish(process, -signal.SIGKILL)
    (tmp_path / "launch-lock.sock.lock").write_text(str(os.getpid()))
    (tmp_path / "notes").touch()
    listeners = [Listener(living), Listener(unlocked)]
    (tmp_path / "launch-unlocked.sock.lock").unlink()
    sweep_sockets(tmp_path, "launch-*.sock*")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "launch-living.sock",
        "launch-living.sock.lock",
        "launch-unlocked.sock",
        "notes",
    ]
    assert answers(living)
    assert answers(unlocked)
    for listener in listeners:
        listener.close()


def test_a_place_that_is_too_long_names_the_variable_and_another_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHMSCHED_SOCKET", raising=False)
    long = tmp_path / ("x" * 100)
    long.mkdir()
    for variable in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setenv(variable, str(long))
        with pytest.raises(
            SocketPathError, match=f"at most 107.* follows from {variable}=.*: set SHMSCHED_SOCKET to a path"
        ):
            Listener(default_socket())
    assert list(long.iterdir()) == []
    assert private_directory(30) == Path(f"/tmp/shmsched-{os.geteuid()}")
    monkeypatch.setenv("SHMSCHED_SOCKET", str(tmp_path / ("y" * 108)))
    with pytest.raises(SocketPathError, match="Choose a shorter one with SHMSCHED_SOCKET"):
        Listener(default_socket())


def test_a_link_on_the_way_that_is_removed_leaves_no_dead_socket(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    listener = Listener(link / "s")
    assert {path.name for path in real.iterdir()} == {"s", "s.lock"}
    link.unlink()
    listener.close()
    assert list(real.iterdir()) == []

"""A try that failed leaves nothing: no descriptor, no thread, no process. And it names what the system lacks."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.commands import shmsched as command

import shmsched
from shmsched.wire import frames
from shmsched.wire.codec import pack
from shmsched.wire.framing import framed

from faults.limits import no_further_process
from support.peers.daemon import Answering

TRIES = 20
DEADLINE = 30.0
HERE = Path(__file__).parent.parent


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def sync(path: Path) -> None:
    shmsched.Client(socket=path).close()


def asynchronous(path: Path) -> None:
    async def connect() -> None:
        async with shmsched.AsyncClient(socket=path):
            pass

    asyncio.run(connect())


def leaves_nothing(attempt: Callable[[Path], None], path: Path, error: type[BaseException], words: str) -> None:
    with pytest.raises(error, match=words):
        attempt(path)
    before = held()
    for _ in range(TRIES):
        # Without a collection: whoever tries again and again has none either.
        with pytest.raises(error, match=words):
            attempt(path)
        assert held() <= before
    assert held() <= before


WAYS = [pytest.param(sync, id="Client"), pytest.param(asynchronous, id="AsyncClient")]


@pytest.mark.parametrize("attempt", WAYS)
def test_a_client_that_is_not_let_in_leaves_nothing(attempt: Callable[[Path], None], tmp_path: Path) -> None:
    leaves_nothing(attempt, tmp_path / "nobody", shmsched.SchedulerUnreachable, "no such socket")
    welcome = frames.Welcome(1, os.getpid(), 64, 64, 64, 64, 0)
    for name, data, error, words in (
        ("refused", framed(pack(frames.Refused(3, "no room"))), shmsched.Full, "no room"),
        ("version", framed(pack(frames.Refused(12, "speaks protocol 9"))), shmsched.ProtocolError, "protocol 9"),
        ("mute", b"", shmsched.SchedulerUnreachable, "closed the connection"),
        ("garbage", b"\xff" * 64, shmsched.ProtocolError, "frame"),
        ("no descriptor", framed(pack(welcome)), shmsched.ProtocolError, "without the descriptor"),
    ):
        with Answering(tmp_path / name, data):
            leaves_nothing(attempt, tmp_path / name, error, words)


def run_alone(program: str, *arguments: str) -> str:
    """In a process of its own, which may be allowed little."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=3 * DEADLINE,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )
    assert done.stderr == ""
    return done.stdout


WITHOUT_THREADS = """
import os, sys
import shmsched
from faults.limits import no_further_process
from support.peers.daemon import Answering
from faults.test_failed_tries import leaves_nothing, sync

sync(sys.argv[1])
with no_further_process(os.getpid()):
    leaves_nothing(sync, sys.argv[1], shmsched.SystemLimit, r"a client needs a thread: .*pids.max")
    try:
        shmsched.launch("echo")
    except shmsched.SystemLimit as e:
        assert "pids.max" in str(e), e
        print("told")
sync(sys.argv[1])
"""


def test_without_a_further_thread_or_process_a_client_and_a_launch_say_so_and_leave_nothing() -> None:
    with no_further_process(os.getpid()):
        # Skips here, where it can be said.
        pass
    with shmsched.launch("echo") as cluster:
        assert run_alone(WITHOUT_THREADS, str(cluster.socket)) == "told\n"


WITHOUT_ADDRESS_SPACE = """
import os, resource, sys
import shmsched
from faults.limits import address_space, limited
from faults.test_failed_tries import leaves_nothing, sync

sync(sys.argv[1])
with limited(os.getpid(), resource.RLIMIT_AS, address_space(os.getpid()) + (1 << 16)):
    leaves_nothing(sync, sys.argv[1], shmsched.SystemLimit, r"ulimit -v")
sync(sys.argv[1])
"""


def test_without_address_space_a_client_says_so_and_leaves_nothing() -> None:
    with shmsched.launch("echo") as cluster:
        run_alone(WITHOUT_ADDRESS_SPACE, str(cluster.socket))


def test_a_daemon_that_may_write_small_files_only_says_so(tmp_path: Path) -> None:
    """Shared memory is a file, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, before[1]))
    try:
        with pytest.raises(shmsched.ShmschedError, match=r"at most 16,384 bytes.*ulimit -f"):
            shmsched.launch("echo")
        up = command(tmp_path, "up", "--engine", "echo", "--socket", str(tmp_path / "s"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert up.returncode == 1
    assert "ulimit -f" in up.stderr
    assert "Traceback" not in up.stderr


def test_a_daemon_that_may_start_no_thread_says_so(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from faults.limits import no_further_process\n"
        "from shmsched.daemon.config import DaemonConfig\n"
        "from shmsched.daemon.running import run\n"
        "with no_further_process(os.getpid()):\n"
        "    sys.exit(run(DaemonConfig(socket=Path(sys.argv[1]))))\n"
    )
    with no_further_process(os.getpid()):
        pass
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "s")],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )
    assert done.returncode == 1
    assert "needs a thread" in done.stderr
    assert "pids.max" in done.stderr
    assert "Traceback" not in done.stderr

"""Faults of what processes hand each other: messages that run code, and sockets that a fork copies."""

from __future__ import annotations

import ast
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shmsched
from shmsched.wire import frames
from shmsched.wire.codec import pack
from shmsched.wire.framing import framed
from shmsched.workers.echo import advance, answer

from faults.decoding import DEADLINE, VOCAB, Decoding
from processes.leftovers import wait_until

ROOT = Path(__file__).parents[2]


# --- F11 ----------------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it makes a directory."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._mark),)


def bombs(mark: Path) -> list[bytes]:
    return [pickle.dumps(Bomb(mark), protocol) for protocol in (0, pickle.HIGHEST_PROTOCOL)]


def test_f11_the_daemon_unpickles_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    pickle.loads(bombs(mark)[0])
    assert mark.is_dir(), "the bomb is none"
    mark.rmdir()
    with shmsched.launch(f"echo?vocab={VOCAB}") as cluster, cluster.client() as client:
        decoding = Decoding(client)
        for bomb in bombs(mark):
            for role in (None, frames.Role.CLIENT, frames.Role.ENGINE, frames.Role.CONTROL):
                with socket.socket(socket.AF_UNIX) as peer:
                    peer.settimeout(DEADLINE)
                    peer.connect(str(cluster.socket))
                    if role is not None:
                        peer.sendall(framed(pack(frames.Hello(frames.MAGIC, frames.MAJOR, frames.MINOR, role))))
                    peer.sendall(framed(bomb))
                    while peer.recv(65536):
                        pass
            # Where bytes are allowed, they stay bytes.
            client.open_session(options=bomb).close()
        decoding.go_on(10)
        assert not mark.exists()


@pytest.mark.parametrize("greeted", [False, True])
def test_f11_clients_and_engines_unpickle_nothing(tmp_path: Path, greeted: bool) -> None:
    mark, path = tmp_path / "mark", tmp_path / "fake.sock"
    engine = [sys.executable, "-m", "shmsched.engine", "echo", "--socket", str(path)]
    client = [sys.executable, "-c", f"import shmsched\nshmsched.Client(socket={str(path)!r}).open_session()"]
    before = b""
    if greeted:
        before = framed(pack(frames.Model(10, 1, 10, 1, 1, 1, 1, 0, "echo", "", ()))) + framed(
            pack(frames.Stopping(1.0))
        )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(DEADLINE)
        for bomb in bombs(mark):
            for command in (client, engine):
                with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
                    peer, _ = listener.accept()
                    with peer:
                        peer.settimeout(DEADLINE)
                        assert peer.recv(65536)
                        peer.sendall((before if command is client else b"") + framed(bomb))
                        _, err = process.communicate(timeout=DEADLINE)
                    assert process.returncode == 1
                    assert "a frame of " in err
    assert not mark.exists()


def test_f11_no_module_can_unpickle_what_a_peer_sends() -> None:
    forbidden = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    paths = [path for top in ("shmsched", "workers", "tools") for path in sorted((ROOT / top).rglob("*.py"))]
    # What the bench measures beside us is not us: ZeroMQ, the standard library's queues. Those pickle, within one bench.
    others = ROOT / "tools" / "bench" / "peers"
    paths = [path for path in paths if path.parent != others or path.name == "shmsched.py"]
    # Stress and bench tell their own children things, over sockets that those inherit and nobody else can reach.
    own = {ROOT / "tools" / name for name in ("load/part.py", "load/fleet.py", "bench/contestant.py", "bench/crew.py")}
    paths = [path for path in paths if path not in own]
    assert len(paths) > 80
    found = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names):
                    bad = [n.name for n in names if n.name.split(".")[0] in {*forbidden, "multiprocessing"}]
                case ast.ImportFrom(module=str(module), names=names):
                    # A Connection is a descriptor with send_bytes; its send and recv, and all queues and pipes, pickle.
                    harmless = module == "multiprocessing.connection" and {n.name for n in names} == {"Connection"}
                    bad = [module] if module.split(".")[0] in {*forbidden, "multiprocessing"} and not harmless else []
                case ast.Call(func=ast.Attribute(value=value, attr="recv" | "send" as method), args=args):
                    owner = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
                    bad = [f"{owner}.{method}"] if "connection" in owner or (method == "recv" and not args) else []
                case ast.keyword(arg="allow_pickle"):
                    bad = ["allow_pickle"]
                case _:
                    bad = []
            found += [f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} {name}" for name in bad]
    assert found == []


# --- F12, F15 -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(f"echo?vocab={VOCAB}") as cluster:
        yield cluster


def test_f12_use_after_fork_is_an_error_in_the_child_and_the_parent_goes_on(cluster: shmsched.Cluster) -> None:
    with cluster.client() as client:
        decoding = Decoding(client)
        session = decoding.session
        uses: list[Callable[[], object]] = [
            lambda: session.submit([1]),
            client.open_session,
            lambda: client.models,
            lambda: outstanding.result(DEADLINE),
        ]
        outstanding = client.open_session().submit([7] * 100_000)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                for use in uses:
                    try:
                        use()
                    except shmsched.UsedAfterFork as e:
                        os.write(writer, f"{e}\n".encode())
                session.close()
                client.close()
            finally:
                os._exit(0)
        os.close(writer)
        decoding.go_on(20)
        assert os.waitpid(child, 0)[1] == 0
        with os.fdopen(reader) as said:
            messages = said.read().splitlines()
        assert len(messages) == len(uses)
        assert all(f"process {os.getpid()}" in message for message in messages)
        decoding.go_on(20)
        assert outstanding.result(DEADLINE).tokens.tolist() == [answer(advance(0, [7] * 100_000), VOCAB)]


def test_f15_a_forked_child_closes_its_copy_of_the_socket(cluster: shmsched.Cluster) -> None:
    with cluster.client() as client:
        socket_name = os.readlink(f"/proc/self/fd/{client._link._sock.fileno()}")
        ready, ready_writer = os.pipe()
        waits, waits_writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(waits_writer)
            os.write(ready_writer, b".")
            os.read(waits, 1)
            os._exit(0)
        try:
            assert os.read(ready, 1) == b"."
            held = {os.readlink(fd) for fd in Path(f"/proc/{child}/fd").iterdir()}
            assert socket_name.startswith("socket:")
            assert socket_name not in held
            Decoding(client).go_on(5)
        finally:
            for fd in (ready, ready_writer, waits, waits_writer):
                os.close(fd)
            os.waitpid(child, 0)


def test_f15_a_child_that_holds_the_socket_does_not_hide_its_parents_death(cluster: shmsched.Cluster) -> None:
    """With a child that never runs Python again, so that nothing closes its copy of the socket."""
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.setsid()
        client = shmsched.Client(socket=cluster.socket)
        client.open_session()
        # Spawned by the C library: no fork hook of Python runs in it, and it inherits the socket.
        os.set_inheritable(client._link._sock.fileno(), True)
        sleeper = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)
        os.write(writer, f"{sleeper}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    sleeper = int(os.read(reader, 100))
    os.close(reader)
    os.close(writer)
    try:
        wait_until(
            lambda: not any(c["pid"] == parent for c in cluster.status()["clients"]),
            "the daemon to see the client's death",
        )
        assert cluster.status()["engines"][0]["sessions"] == 0
    finally:
        os.kill(sleeper, signal.SIGKILL)


def test_logits_in_a_forked_child_are_those_of_the_parent_as_long_as_it_holds_them(cluster: shmsched.Cluster) -> None:
    """And a copy made before the fork stays."""
    with cluster.client() as client, client.open_session() as session:
        logits = session.submit([1], sampling=None).result(DEADLINE).logits
        assert logits is not None
        rows, copy = logits.data, logits.copy()
        go, went = os.pipe()
        child = os.fork()
        if child == 0:
            same = bool((rows == copy).all())
            os.read(go, 1)
            # In the child letting go gives nothing back to anybody.
            logits.release()
            os._exit(0 if same and copy[0].argmax() == answer(advance(0, [1]), VOCAB) else 1)
        os.write(went, b".")
        assert os.waitpid(child, 0)[1] == 0
        os.close(go)
        os.close(went)
        other = session.submit([2], sampling=None).result(DEADLINE)
        assert other.logits is not None
        assert (rows == copy).all()

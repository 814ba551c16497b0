"""A private daemon and its engines in one line, for tests, notebooks and programs that want no service."""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from shmsched.client.client import Client
from shmsched.client.control import Control
from shmsched.errors import EngineStartError, InvalidRequest, ShmschedError
from shmsched.not_copied import NotCopied
from shmsched.scheduling.params import SchedulerParams
from shmsched.wire.listener import sweep_sockets
from shmsched.wire.socket_path import private_directory

STOP_S = 15.0


def launch(
    *specs: str,
    engines: int = 1,
    max_decode_sequences: int = 32,
    max_prefill_chunk_size: int = 256,
    start_timeout: float = 600.0,
    stderr: int | None = None,
    **settings: Any,
) -> Cluster:
    """Start a daemon of one's own with ``engines`` copies of each engine spec, and wait until they are up.

    The daemon ends with the cluster's ``close()`` or with this process, however this process ends. ``settings`` are further
    fields of ``DaemonConfig`` that are plain numbers. Raises EngineStartError with its reason if no engine comes up; what
    daemon and engines print goes to standard error, or to the descriptor ``stderr``, which they inherit.
    """
    if engines < 1:
        raise InvalidRequest(f"engines is {engines}; it must be 1 or more. For no engine at all, name no spec")
    params = SchedulerParams(max_decode_sequences, max_prefill_chunk_size)
    config = {
        "socket": str(_private_socket()),
        "engines": [{"spec": spec, "copies": engines} for spec in specs],
        "params": {
            "max_decode_sequences": params.max_decode_sequences,
            "max_prefill_chunk_size": params.max_prefill_chunk_size,
        },
        "launcher_pid": os.getpid(),
        **settings,
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "shmsched.daemon"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    )
    cluster = Cluster(process, Path(config["socket"]))
    try:
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(json.dumps(config).encode())
        cluster._wait_ready(start_timeout)
    except BaseException:
        cluster.close()
        raise
    return cluster


class Cluster(NotCopied):
    """A private daemon: ``client()`` connects to it, ``close()`` or the end of a ``with`` block ends it."""

    def __init__(self, process: subprocess.Popen[bytes], socket: Path) -> None:
        self.socket = socket
        self._process = process
        self._clients: list[Client] = []

    @property
    def pid(self) -> int:
        """The daemon's."""
        return self._process.pid

    def client(self, *, arena_bytes: int | None = None) -> Client:
        """A new client of this daemon. It is closed with the cluster, if not before."""
        client = Client(socket=self.socket, arena_bytes=arena_bytes)
        self._clients.append(client)
        return client

    def status(self, *, batches: int = 0) -> dict[str, Any]:
        """The daemon's status document."""
        with Control(self.socket) as control:
            return control.status(batches=batches)

    def close(self) -> int:
        """End the daemon and its engines, and wait until they have ended. Returns the daemon's exit status. Idempotent."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        if self._process.poll() is None:
            self._stop()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return self._process.wait()

    def _stop(self) -> None:
        """At once: whoever ends a private daemon does not wait for clients of other processes."""
        try:
            with Control(self.socket) as control:
                control.stop(drain_s=0.0)
        except ShmschedError:
            # Not up yet, or stopping already.
            self._process.terminate()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_ready(self, timeout: float) -> None:
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        deadline = time.monotonic() + timeout
        line = b""
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise EngineStartError(f"the engines were not up within {timeout:g} s")
            data = os.read(self._process.stdout.fileno(), 4096)
            if not data:
                raise EngineStartError(
                    "the daemon ended before its engines were up; its messages are on standard error"
                )
            line += data
        if line.startswith(b"failed "):
            raise EngineStartError(f"no engine came up: {line[7:].decode(errors='replace').strip()}")


def _private_socket() -> Path:
    """A path that no other launcher has, in this or any other container. Those of daemons that are dead are removed on the way."""
    name = f"launch-{secrets.token_hex(8)}.sock"
    directory = private_directory(len(name))
    sweep_sockets(directory, "launch-*.sock*")
    return directory / name

"""A private daemon and its engines in one line, for tests, notebooks and programs that want no service."""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shmsched.arguments import LONGEST_S, number, text, whole
from shmsched.client.child_log import ChildLog
from shmsched.client.client import Client
from shmsched.client.control import Control
from shmsched.errors import EngineStartError, ShmschedError, SystemLimit
from shmsched.limits import is_shortage, lacking, no_thread
from shmsched.not_copied import NotCopied
from shmsched.scheduling.settings import checked
from shmsched.surroundings import UTF_8
from shmsched.wire.listener import sweep_sockets
from shmsched.wire.socket_path import private_directory

STOP_S = 15.0
LAST_WORDS_S = 1.0
"""How long to wait for them once the daemon has ended: a helper of an engine may still hold the pipe."""


def launch(
    *specs: str,
    engines: int = 1,
    start_timeout: float = 600.0,
    stderr: int | None = None,
    **settings: float,
) -> Cluster:
    """Start a daemon of one's own with ``engines`` copies of each engine spec, and wait until they are up.

    The daemon ends with the cluster's ``close()`` or with this process, however this process ends. ``settings``:
    ``max_decode_sequences``, ``step_timeout_s`` and the others of ``shmsched.scheduling.settings``. What daemon and engines print
    goes to standard error once they are up; if none comes up, it ends the message of the EngineStartError that is raised. With
    ``stderr`` it goes to that descriptor, which they inherit, from the beginning.
    """
    for spec in specs:
        text("spec", spec)
    engines = whole("engines", engines, 1, 2**16, where="(for no engine at all, name no spec)")
    start_timeout = number("start_timeout", start_timeout, 0, LONGEST_S)
    params, rest = checked(settings)
    config = {
        "socket": str(_private_socket()),
        "engines": [{"spec": spec, "copies": engines} for spec in specs],
        **asdict(params),
        **rest,
        "launcher_pid": os.getpid(),
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shmsched.daemon"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if stderr is None else stderr,
            env={**os.environ, **UTF_8},
            start_new_session=True,
        )
    except OSError as e:
        if not is_shortage(e):
            raise
        raise SystemLimit(f"the daemon's process cannot be started: {lacking(e)}") from e
    try:
        cluster = Cluster(process, Path(config["socket"]))
    except RuntimeError as e:
        with process:
            process.kill()
        raise no_thread("reading what a daemon says", e) from e
    try:
        assert process.stdin is not None
        try:
            with process.stdin as stdin:
                stdin.write(json.dumps(config).encode())
        except BrokenPipeError:
            # It has ended already, and says why.
            pass
        fault = cluster._wait_ready(start_timeout)
    except BaseException:
        cluster.close()
        raise
    if fault is not None:
        cluster.close()
        raise _not_started(fault, cluster._log.last_words(LAST_WORDS_S) if cluster._log is not None else "")
    if cluster._log is not None:
        cluster._log.hand_on()
    return cluster


def _not_started(fault: str, said: str) -> EngineStartError:
    """With the last words, unless the reason is all that they say."""
    lines = said.splitlines()
    if not fault:
        fault = "the daemon ended before its engines were up"
        fault += f": {lines[-1]}" if lines else ""
    return EngineStartError(fault, said if len(lines) > 1 else "")


class Cluster(NotCopied):
    """A private daemon: ``client()`` connects to it, ``close()`` or the end of a ``with`` block ends it."""

    def __init__(self, process: subprocess.Popen[bytes], socket: Path) -> None:
        self.socket = socket
        self._process = process
        self._log = ChildLog(process.stderr) if process.stderr is not None else None
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
        status = self._process.wait()
        if self._log is not None:
            self._log.join(LAST_WORDS_S)
        return status

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_ready(self, timeout: float) -> str | None:
        """Why no engine is up, as far as somebody has said so; None if they are."""
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        deadline = time.monotonic() + timeout
        line = b""
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return f"the engines were not up within {timeout:g} s"
            data = os.read(self._process.stdout.fileno(), 4096)
            if not data:
                return ""
            line += data
        if line.startswith(b"failed "):
            return f"no engine came up: {line[7:].decode(errors='replace').strip()}"
        return None


def _private_socket() -> Path:
    """A path that no other launcher has, in this or any other container. Those of daemons that are dead are removed on the way."""
    name = f"launch-{secrets.token_hex(8)}.sock"
    directory = private_directory(len(name))
    sweep_sockets(directory, "launch-*.sock*")
    return directory / name

"""The daemon that is stressed: its counters before and after, and what it has left behind."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from shmsched import Client, Cluster, Control, launch
from shmsched.tools.load.chaos import Fault
from shmsched.tools.load.options import LEAST_SESSION_TOKENS, MODEL, QUIET_MODEL, QUIET_STEP_S, Options
from shmsched.tools.load.said import Ear
from shmsched.tools.load.shortages import SHM, NotInjected, own_shm

START_S = 20.0
STEP_TIMEOUT_S = 3.0
"""Of our own daemon, where engines are stopped."""
GONE_S = 3.0
LOOK_S = 0.02
QUIET_ENGINE = f"echo?model={QUIET_MODEL}&step_us={QUIET_STEP_S * 1e6:g}&max_sessions=1&vocab=1000"
MARK = "SHMSCHED_STRESS_RUN"

Status = dict[str, Any]
"""What the daemon says of itself."""


class UnfitTarget(Exception):
    """Nothing can be checked on this daemon."""


LEDGER = ("submitted", "queued", "in_flight", "completed", "failed", "cancelled")


def balanced(ledger: dict[str, int]) -> bool:
    return ledger["submitted"] == sum(ledger[name] for name in LEDGER[1:])


def pids(status: Status) -> set[int]:
    return {status["pid"], *(engine["pid"] for engine in status["engines"])}


def engines_of(status: Status, model: str) -> list[dict[str, Any]]:
    return [engine for engine in status["engines"] if engine["model"] == model]


class Target:
    """A daemon of our own, or somebody's."""

    def __init__(self, options: Options, ear: Ear) -> None:
        """Raises ShmschedError if there is no daemon, UnfitTarget if its engines cannot be checked."""
        self.not_injected: dict[Fault, str] = {}
        """What cannot be injected here, and why."""
        self.shm_stays: set[str] = set()
        """Names in /dev/shm that are ours and do not go."""
        self._shm_suspects: set[str] = set()
        self._shm_before = _shm_names()
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._mark_before = os.environ.get(MARK)
        os.environ[MARK] = self._mark
        self._cluster = self._launched(options, ear) if options.socket is None else None
        self.socket = Path(options.socket if self._cluster is None else self._cluster.socket)  # type: ignore[arg-type]
        try:
            self._check_models()
            self.before = self._baseline()
        except BaseException:
            self.close(time.monotonic() + GONE_S)
            raise
        self._descriptors_before = self._descriptors()

    def _launched(self, options: Options, ear: Ear) -> Cluster:
        chaos = options.chaos
        specs = [options.engine] * options.engines
        if chaos:
            specs.append(QUIET_ENGINE)
        if Fault.FULL_SHM in chaos.every_s:
            try:
                own_shm()
            except NotInjected as e:
                self.not_injected[Fault.FULL_SHM] = str(e)
        settings: dict[str, Any] = {"step_timeout_s": STEP_TIMEOUT_S} if Fault.STOP_ENGINE in chaos.every_s else {}
        with ear.pipe("the daemon or an engine") as stderr:
            return launch(*specs, start_timeout=START_S, stderr=stderr, **settings)

    @property
    def is_ours(self) -> bool:
        return self._cluster is not None

    @property
    def pid(self) -> int:
        """Of our own daemon."""
        assert self._cluster is not None
        return self._cluster.pid

    def status(self) -> Status:
        with Control(self.socket) as control:
            return control.status()

    def _baseline(self) -> Status:
        """The status before the run, once the connection that looked at the models is gone from it."""
        deadline = time.monotonic() + GONE_S
        while _held(status := self.status(), {os.getpid()}) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return status

    def _descriptors(self) -> Counter[str]:
        """Of what kind those are that our own daemon has open, and how many of each; none of another one."""
        kinds: Counter[str] = Counter()
        for entry in Path(f"/proc/{self.pid}/fd").iterdir() if self.is_ours else ():
            # It may be closed in this moment.
            with suppress(OSError):
                kinds[re.sub(r"[-:\d]+", "", os.readlink(entry).removesuffix(" (deleted)"))] += 1
        return kinds

    def _check_models(self) -> None:
        with Client(socket=self.socket) as client:
            models = dict(client.models)
        if self.is_ours:
            models.pop(QUIET_MODEL, None)
        if MODEL not in models or (self.is_ours and len(models) > 1):
            served = ", ".join(repr(model) for model in sorted(models)) or "nothing"
            raise UnfitTarget(f"the engines serve {served}; only the answers of model {MODEL!r} can be checked")
        most = models[MODEL].info.max_session_tokens
        if most < LEAST_SESSION_TOKENS:
            raise UnfitTarget(
                f"a session of the engines holds {most} tokens; at least {LEAST_SESSION_TOKENS} are needed"
            )

    def watch_shm(self, pids: set[int]) -> None:
        """Look at /dev/shm. A name may be there for the moment of its making; one seen twice stays."""
        names = {name for name in _shm_names() - self._shm_before if _made_by(name, pids)}
        self.shm_stays |= names & self._shm_suspects
        self._shm_suspects = names

    def settle(self, clients: set[int], deadline: float) -> tuple[Status, list[str]]:
        """Wait until nothing of the clients is left in the daemon. Returns its last status, and what is left in words."""
        while True:
            status = self.status()
            left = _held(status, None if self.is_ours else clients)
            more = status["shared_memory"]["used_bytes"] - self.before["shared_memory"]["used_bytes"]
            if self.is_ours and more > 0:
                left.append(f"{more:,} bytes of shared memory are not given back")
            left += [
                f"{n} descriptors of the daemon are not closed: {kind}"
                for kind, n in (self._descriptors() - self._descriptors_before).items()
            ]
            ledger = status["ledger"]
            busy = self.is_ours and (ledger["queued"] or ledger["in_flight"])
            if not (left or busy) or time.monotonic() >= deadline:
                return status, left
            time.sleep(LOOK_S)

    def close(self, deadline: float) -> tuple[list[str], list[str]]:
        """End our own daemon by the deadline. Returns what outlived it, and how it ended if not well, in words."""
        left: list[str] = []
        problems: list[str] = []
        if self._cluster is not None:
            timer = threading.Timer(max(0.5, deadline - time.monotonic()), kill, [self.pid])
            timer.start()
            try:
                status = self._cluster.close()
            finally:
                timer.cancel()
            if status != 0:
                problems.append(f"the daemon (pid {self.pid}) ended with status {status}")
            left = [f"process {pid} outlived the daemon; it was killed" for pid in _end_marked(self._mark)]
        if self._mark_before is None:
            os.environ.pop(MARK, None)
        else:
            os.environ[MARK] = self._mark_before
        return left, problems


def _held(status: Status, pids: set[int] | None) -> list[str]:
    """Clients and sessions that are still there, in words: those of ``pids``, or with None all of them."""
    said: list[str] = []
    for client in status["clients"]:
        if pids is None or client["pid"] in pids:
            said.append(f"the daemon still has client {client['client']} of pid {client['pid']}")
            said += [f"a session of client {client['client']}"] * client["sessions"]
    if pids is None:
        for engine in status["engines"]:
            said += [f"the daemon still has a session in engine {engine['engine']}"] * engine["sessions"]
        said += ["a session still waits for a slot"] * status["waiting_sessions"]
    return said


def _shm_names() -> set[str]:
    return {entry.name for entry in SHM.iterdir() if "shmsched" in entry.name} if SHM.is_dir() else set()


def _made_by(name: str, pids: set[int]) -> bool:
    """The name carries its maker's pid; one that names none may be ours as well."""
    maker = re.match(r"[^-]*-(\d+)", name)
    return maker is None or int(maker[1]) in pids


def _end_marked(mark: str) -> list[int]:
    """Whoever inherited our environment and still runs after a while is left over. Kills them."""
    deadline = time.monotonic() + GONE_S
    while (left := _marked(f"{MARK}={mark}".encode())) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    for pid in left:
        kill(pid)
    return left


def _marked(wanted: bytes) -> list[int]:
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()):
        # It may have ended, or is not ours to look at.
        with suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def kill(pid: int) -> None:
    # It may have ended by itself in this moment.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

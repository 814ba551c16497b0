"""The daemon that is stressed: its counters before and after, and what it has left behind."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmsched import Client, Cluster, Control, launch
from shmsched.tools.load.chaos import Fault
from shmsched.tools.load.ear import Ear
from shmsched.tools.load.options import LEAST_SESSION_TOKENS, MODEL, QUIET_MODEL, QUIET_STEP_S, Options
from shmsched.tools.load.shortages import NotInjected, own_shm

START_S = 20.0
STEP_TIMEOUT_S = 3.0
"""Of our own daemon, where engines are stopped."""
GONE_S = 3.0
QUIET_ENGINE = f"echo?model={QUIET_MODEL}&step_us={QUIET_STEP_S * 1e6:g}&max_sessions=1&vocab=1000"
MARK = "SHMSCHED_STRESS_RUN"
_SHM = Path("/dev/shm")


class UnfitTarget(Exception):
    """Nothing can be checked on this daemon."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where steps stand."""

    submitted: int = 0
    queued: int = 0
    in_flight: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def balanced(self) -> bool:
        return self.submitted == self.queued + self.in_flight + self.completed + self.failed + self.cancelled


@dataclass(slots=True)
class Status:
    """What matters here of a daemon's status document."""

    document: dict[str, Any]

    @property
    def ledger(self) -> Ledger:
        counts = self.document["ledger"]
        return Ledger(*(counts[name] for name in Ledger.__slots__))

    @property
    def engines(self) -> dict[int, tuple[int, int, int]]:
        """Batches, steps and tokens that each engine of the model has run."""
        return {
            e["engine"]: (e["batches"], e["steps"], e["tokens"])
            for e in self.document["engines"]
            if e["model"] == MODEL
        }

    @property
    def quiet_engines(self) -> list[int]:
        """Those that no fault hits, by pid."""
        return [e["pid"] for e in self.document["engines"] if e["model"] == QUIET_MODEL]

    @property
    def pids(self) -> set[int]:
        return {self.document["pid"], *(engine["pid"] for engine in self.document["engines"])}

    @property
    def restarts(self) -> int:
        return sum(worker["restarts"] for worker in self.document["workers"])

    @property
    def given_up(self) -> list[str]:
        """Engines that the daemon will not start again, in words."""
        return [
            f"engine {worker['spec']} was given up: {worker['reason'] or worker['last_exit']}"
            for worker in self.document["workers"]
            if worker["state"] == "given up"
        ]

    @property
    def shared_memory(self) -> int:
        return int(self.document["shared_memory"]["used_bytes"])

    def held_by(self, pids: set[int] | None) -> list[str]:
        """Clients and sessions that are still there, in words: those of ``pids``, or with None all of them."""
        said = []
        for client in self.document["clients"]:
            if pids is None or client["pid"] in pids:
                said.append(f"the daemon still has client {client['client']} of pid {client['pid']}")
                said += [f"a session of client {client['client']}"] * client["sessions"]
        if pids is None:
            for engine in self.document["engines"]:
                said += [f"the daemon still has a session in engine {engine['engine']}"] * engine["sessions"]
            said += ["a session still waits for a slot"] * self.document["waiting_sessions"]
        return said


@dataclass(slots=True)
class Target:
    """A daemon of our own, or somebody's."""

    socket: Path
    cluster: Cluster | None
    mark: str
    shm_before: frozenset[str] = frozenset()
    not_injected: dict[Fault, str] = field(default_factory=dict)
    """What cannot be injected here, and why."""
    shm_suspects: set[str] = field(default_factory=set)
    shm_seen: set[str] = field(default_factory=set)
    descriptors_before: Counter[str] = field(default_factory=Counter)
    """Of our own daemon, by kind."""
    _mark_before: str | None = None

    @classmethod
    def open(cls, options: Options, ear: Ear) -> Target:
        """Raises ShmschedError if there is no daemon, UnfitTarget if its engines cannot be checked."""
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        mark_before, os.environ[MARK] = os.environ.get(MARK), mark
        shm = frozenset(_shm_names())
        if options.socket is not None:
            target = cls(options.socket, None, mark, shm, _mark_before=mark_before)
        else:
            stops = options.chaos is not None and Fault.STOP_ENGINE in options.chaos.every_s
            settings: dict[str, Any] = {"step_timeout_s": STEP_TIMEOUT_S} if stops else {}
            specs = [options.engine] * options.engines
            not_injected: dict[Fault, str] = {}
            if options.chaos is not None:
                specs.append(QUIET_ENGINE)
                if Fault.FULL_SHM in options.chaos.every_s:
                    try:
                        own_shm()
                    except NotInjected as e:
                        not_injected[Fault.FULL_SHM] = str(e)
            with ear.pipe("the daemon or an engine") as stderr:
                cluster = launch(*specs, start_timeout=START_S, stderr=stderr, **settings)
            target = cls(Path(cluster.socket), cluster, mark, shm, not_injected=not_injected, _mark_before=mark_before)
        try:
            target._check_models()
        except BaseException:
            target.close(time.monotonic() + GONE_S)
            raise
        return target

    def status(self) -> Status:
        with Control(self.socket) as control:
            return Status(control.status())

    def baseline(self) -> Status:
        """The status before the run, once the connection that looked at the models is gone from it."""
        deadline = time.monotonic() + GONE_S
        while (status := self.status()).held_by({os.getpid()}) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.descriptors_before = self._descriptors()
        return status

    def _descriptors(self) -> Counter[str]:
        """Of what kind those are that our own daemon has open, and how many of each; none of another one."""
        kinds: Counter[str] = Counter()
        for entry in Path(f"/proc/{self.cluster.pid}/fd").iterdir() if self.cluster is not None else ():
            try:
                kinds[re.sub(r"[-:\d]+", "", os.readlink(entry).removesuffix(" (deleted)"))] += 1
            except OSError:
                # Closed in this moment.
                continue
        return kinds

    def _check_models(self) -> None:
        with Client(socket=self.socket) as client:
            models = dict(client.models)
        if self.cluster is not None:
            models.pop(QUIET_MODEL, None)
        if MODEL not in models or (self.cluster is not None and len(models) > 1):
            served = ", ".join(repr(model) for model in sorted(models)) or "nothing"
            raise UnfitTarget(f"the engines serve {served}; only the answers of model {MODEL!r} can be checked")
        most = models[MODEL].info.max_session_tokens
        if most < LEAST_SESSION_TOKENS:
            raise UnfitTarget(
                f"a session of the engines holds {most} tokens; at least {LEAST_SESSION_TOKENS} are needed"
            )

    def watch_shm(self, pids: set[int]) -> None:
        """Look at /dev/shm. A name may be there for the moment of its making; one seen twice stays."""
        names = {name for name in _shm_names() if name not in self.shm_before and _made_by(name, pids)}
        self.shm_seen |= names & self.shm_suspects
        self.shm_suspects = names

    def settle(self, pids: set[int], before: Status, deadline: float) -> tuple[Status, list[str]]:
        """Wait until nothing of the clients is left in the daemon. Returns its last status, and what is left in words."""
        own = self.cluster is not None
        while True:
            status = self.status()
            left = status.held_by(None if own else pids)
            if own and status.shared_memory > before.shared_memory:
                left.append(
                    f"{status.shared_memory - before.shared_memory:,} bytes of shared memory are not given back"
                )
            left += [
                f"{n} descriptors of the daemon are not closed: {kind}"
                for kind, n in (self._descriptors() - self.descriptors_before).items()
            ]
            busy = own and (status.ledger.queued or status.ledger.in_flight)
            if not (left or busy) or time.monotonic() >= deadline:
                return status, left
            time.sleep(0.02)

    def close(self, deadline: float) -> tuple[list[str], list[str]]:
        """End our own daemon by the deadline. Returns what outlived it, and how it ended if not well, in words."""
        left: list[str] = []
        problems: list[str] = []
        if self.cluster is not None:
            pid = self.cluster.pid
            timer = threading.Timer(max(0.5, deadline - time.monotonic()), _kill, [pid])
            timer.start()
            try:
                status = self.cluster.close()
            finally:
                timer.cancel()
            if status != 0:
                problems.append(f"the daemon (pid {pid}) ended with status {status}")
            left += [f"process {pid} outlived the daemon; it was killed" for pid in _end_marked(self.mark)]
        if self._mark_before is None:
            os.environ.pop(MARK, None)
        else:
            os.environ[MARK] = self._mark_before
        return left, problems


def _shm_names() -> set[str]:
    return {entry.name for entry in _SHM.iterdir() if "shmsched" in entry.name} if _SHM.is_dir() else set()


def _made_by(name: str, pids: set[int]) -> bool:
    """The name carries its maker's pid; one that names none may be ours as well."""
    words = name.split("-")
    maker = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    return maker in pids or not maker


def _end_marked(mark: str) -> list[int]:
    """Whoever inherited our environment and still runs after a while is left over. Kills them."""
    deadline = time.monotonic() + GONE_S
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        _kill(pid)
    return left


def _marked(mark: str) -> list[int]:
    wanted = f"{MARK}={mark}".encode()
    return [pid for pid in _processes() if pid != os.getpid() and wanted in _environment(pid)]


def _processes() -> Iterable[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass

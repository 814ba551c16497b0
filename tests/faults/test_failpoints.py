"""A process is killed at each named point of the path, and the others see what DESIGN.md's failure table says."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest

import shmsched
from shmsched.client.futures import WaitingStream
from shmsched.dataplane.layouts import GUARD
from shmsched.failpoints import VARIABLE, Name
from shmsched.workers.echo import advance, answer

from faults import lives
from faults.decoding import DEADLINE, VOCAB, Decoding
from processes.leftovers import shm_names, wait_until
from support import failpoints
from support.failpoints import IN_FORWARD, Moment, armed

WITHIN_S = 1.0
"""After a death, until whoever survives has heard of it."""
ROW = -(-4 * VOCAB // 64) * 64 + 2 * GUARD
"""Bytes that a row of logits takes in the arena."""


CLIENT_MOMENTS = {
    **dict.fromkeys(
        (
            Moment("hello.half_sent"),
            Moment("hello.sent"),
            Moment("client.welcome.received"),
            Moment("client.open_session.sent"),
            Moment("client.submit.written", 10),
            Moment("client.submit.half_sent", 10),
            Moment("client.submit.sent", 10),
            Moment("client.completions.received"),
            Moment("client.stream.read", 3),
            Moment("client.open_arena.sent"),
            Moment("client.arena.received"),
            Moment("client.logits.leased", 2),
            Moment("client.cancel.sent"),
            Moment("client.fork.sent"),
            Moment("client.close_session.sent"),
        ),
        lives.LIFE,
    ),
    Moment("client.flush.half_sent", 8): lives.ASYNC_LIFE,
    Moment("client.completions.received", 3): lives.ASYNC_LIFE,
    Moment("client.stream.read", 2): lives.ASYNC_LIFE,
    Moment("client.logits.leased"): lives.ASYNC_LIFE,
}
ATTACHING_MOMENTS = [
    Moment("hello.sent"),
    Moment("engine.offer.half_sent"),
    Moment("engine.offer.sent"),
    Moment("engine.attached"),
    Moment("engine.started"),
    Moment("engine.ready.sent"),
]
SERVING_MOMENTS = [
    # Three sessions were opened before, and three batches run. What is outstanding then takes 200 more.
    Moment("engine.open_session.received", 4),
    Moment("engine.session.opened", 4),
    Moment("engine.arena.received"),
    Moment("engine.batch.pulled", 60),
    IN_FORWARD,
    Moment("engine.logits.written", 60),
    Moment("engine.results.written", 60),
    Moment("engine.done.half_sent", 60),
    Moment("engine.done.sent", 60),
    Moment("engine.close_session.received"),
]
GOING_ON = Moment("engine.follow.received", 5)


def test_every_point_is_in_one_place_and_has_its_test() -> None:
    serving = *(m for m in SERVING_MOMENTS if isinstance(m, Moment)), GOING_ON
    tested = {m.point for m in (*CLIENT_MOMENTS, *ATTACHING_MOMENTS, *serving, *DAEMON_MOMENTS)}
    assert tested == set(get_args(Name))
    source = "".join(path.read_text() for path in Path(shmsched.__path__[0]).rglob("*.py") if path.stem != "failpoints")
    assert {name: source.count(f'"{name}"') for name in tested} == dict.fromkeys(tested, 1)


@pytest.mark.parametrize("order", ["engine.done", "engine.done.sent:0", "engine.done.sent:x", ""])
def test_a_name_that_is_none_ends_the_process_as_it_starts(order: str) -> None:
    env = {**os.environ, VARIABLE: order}
    ended = subprocess.run([sys.executable, "-m", "shmsched.daemon"], env=env, capture_output=True, text=True)
    assert ended.returncode != 0
    assert f"SHMSCHED_FAILPOINT is {order!r}; it must be name or name:n" in ended.stderr
    assert "engine.done.half_sent" in ended.stderr


def wait_for_end(pid: int, what: str) -> None:
    """Wait until the process has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], DEADLINE)[0], f"waited {DEADLINE:g} s in vain for {what}"
    finally:
        os.close(fd)


def runs(pid: int) -> bool:
    """Whether it has not ended. Who waits for an orphan is not ours to say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- clients ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(f"echo?vocab={VOCAB}&step_us=500") as cluster:
        yield cluster


def holdings(cluster: shmsched.Cluster) -> dict[str, Any]:
    """What the daemon holds for whoever is connected."""
    status = cluster.status()
    ledger = status["ledger"]
    assert ledger["balanced"]
    return {
        "clients": len(status["clients"]),
        "engines": [(e["state"], e["sessions"], e["queued"]) for e in status["engines"]],
        "waiting": status["waiting_sessions"],
        "outstanding": ledger["queued"] + ledger["in_flight"],
        "shared memory": status["shared_memory"]["used_bytes"],
        "mappings": Path(f"/proc/{cluster.pid}/maps").read_text().count("/shmsched-"),
        "descriptors": len(os.listdir(f"/proc/{cluster.pid}/fd")),
    }


@contextmanager
def nothing_changes(cluster: shmsched.Cluster) -> Iterator[Decoding]:
    """What is held before the block is what is held ``WITHIN_S`` after it, and the bystander goes on."""
    with cluster.client() as client:
        bystander = Decoding(client)
        bystander.go_on(1)
        before = holdings(cluster)
        yield bystander
        last: dict[str, Any] = {}

        def back() -> bool:
            last.update(holdings(cluster))
            return last == before

        try:
            wait_until(back, f"the daemon to hold again {before}", WITHIN_S)
        except AssertionError as e:
            raise AssertionError(f"{e}; it holds {last}") from None
        bystander.go_on(10)


@pytest.mark.parametrize("moment", CLIENT_MOMENTS, ids=str)
def test_a_client_dies_and_nobody_else_notices(cluster: shmsched.Cluster, moment: Moment) -> None:
    with nothing_changes(cluster) as bystander, armed(moment, "-c", CLIENT_MOMENTS[moment], cluster.socket) as doomed:
        while doomed.poll() is None:
            bystander.go_on(5)
        assert doomed.returncode == -signal.SIGKILL, "it lived to its end"


# --- engines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ATTACHING_MOMENTS, ids=str)
def test_an_engine_dies_while_it_attaches_and_nobody_notices(cluster: shmsched.Cluster, moment: Moment) -> None:
    command = ("-m", "shmsched.engine", f"echo?vocab={VOCAB}", "--socket", cluster.socket)
    with nothing_changes(cluster) as bystander, armed(moment, *command) as doomed:
        while doomed.poll() is None:
            bystander.go_on(5)
        assert doomed.returncode == -signal.SIGKILL


def doomed_engine(directory: Path, moment: Moment | str, incarnation: int = 1) -> str:
    return f"{failpoints.__file__}:Doomed:{directory}?die_at={moment}&incarnation={incarnation}"


def states(cluster: shmsched.Cluster) -> list[str]:
    return [e["state"] for e in cluster.status()["engines"]]


def test_a_restarted_engine_that_dies_while_it_attaches_is_started_once_more(tmp_path: Path) -> None:
    spec = doomed_engine(tmp_path, Moment("engine.attached"), incarnation=2)
    with shmsched.launch(spec) as cluster, cluster.client() as client:
        os.kill(cluster.status()["engines"][0]["pid"], signal.SIGKILL)
        wait_until(lambda: cluster.status()["workers"][0]["restarts"] == 2, "a second restart")
        with client.open_session(timeout=DEADLINE) as session:
            assert session.submit([1]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [1]), VOCAB)]
        assert len((tmp_path / "incarnations").read_text().splitlines()) == 3


def test_an_engine_that_dies_in_its_first_start_is_given_up_and_the_other_serves(tmp_path: Path) -> None:
    spec = doomed_engine(tmp_path, Moment("engine.started"))
    with shmsched.launch(spec, f"echo?vocab={VOCAB}") as cluster, cluster.client() as client:
        (worker,) = [w for w in cluster.status()["workers"] if w["spec"] == spec]
        assert (worker["state"], worker["last_exit"]) == (
            "given up",
            "killed by SIGKILL, perhaps because memory ran out",
        )
        Decoding(client).go_on(5)


class Victims:
    """What is outstanding on an engine of which it is known that it dies, and what came of it."""

    def __init__(self, client: shmsched.Client, engine: int) -> None:
        self._client = client
        self.sessions: list[shmsched.Session] = []
        self.others: list[shmsched.Session] = []
        # As many in the other engine: then the one that loses a session has the most room.
        while min(len(self.sessions), len(self.others)) < 3:
            session = client.open_session(timeout=DEADLINE)
            (self.sessions if session.engine == engine else self.others).append(session)
        self.hashes = [0, 0, 0]
        for i, session in enumerate(self.sessions):
            self.hashes[i] = advance(0, [i])
            assert session.submit([i]).result(DEADLINE).tokens.tolist() == [answer(self.hashes[i], VOCAB)]
        self.futures: list[Future[shmsched.Response]] = []
        self.stream: WaitingStream | None = None
        self.refusals: list[shmsched.ShmschedError] = []

    def load(self) -> None:
        """Steps, raw ones among them and one with a deadline, a generation, and sessions closed and opened."""
        try:
            self.stream = self.sessions[0].stream([1], further=100_000)
            # One by one: it may die before all is submitted.
            for t in range(3):
                self.futures.append(self.sessions[1].submit([t], sampling=None))
            for t in range(200):
                self.futures.append(self.sessions[1].submit([t]))
            self.futures.append(self.sessions[1].submit([1], deadline=time.monotonic() + 100))
            self.sessions[2].close()
        except shmsched.StepError as e:
            self.refusals.append(e)
        try:
            # Its engine has the most room now, if it still lives.
            self.others.append(self._client.open_session(timeout=DEADLINE))
        except shmsched.StepError as e:
            self.refusals.append(e)

    def check(self) -> None:
        """Everything has ended, with the errors of the failure table, and what was answered was answered right."""
        h = self.hashes[1]
        fed = [*range(3), *range(200), 1]
        for token, future in zip(fed, self.futures, strict=False):
            h = advance(h, [token])
            error = future.exception(0)
            if error is None:
                response = future.result()
                got = response.tokens if response.logits is None else response.logits.data.argmax(axis=1)
                assert got.tolist() == [answer(h, VOCAB)]
            else:
                assert isinstance(error, shmsched.EngineDied | shmsched.SessionLost), error
        # There are more steps than batches before the point: the last one cannot have run.
        assert self.refusals or self.futures[-1].exception(0)
        assert all(isinstance(e, shmsched.EngineDied | shmsched.SessionLost) for e in self.refusals), self.refusals
        assert self.stream is not None
        assert self.stream.wait_until_ended(0)
        h = advance(self.hashes[0], [1])
        with pytest.raises((shmsched.EngineDied, shmsched.SessionLost)):
            while True:
                token = self.stream.next(0).token
                assert token == answer(h, VOCAB)
                h = advance(h, [token])
        for session in self.sessions[:2]:
            assert isinstance(session.ended, shmsched.SessionLost)
            with pytest.raises(shmsched.SessionLost):
                session.submit([1])


@pytest.mark.parametrize("moment", SERVING_MOMENTS, ids=str)
def test_an_engine_dies_and_its_own_sessions_only_are_lost(tmp_path: Path, moment: Moment | str) -> None:
    with (
        shmsched.launch(doomed_engine(tmp_path, moment), f"echo?vocab={VOCAB}") as cluster,
        cluster.client(arena_bytes=3 * ROW) as client,
    ):
        (doomed,) = [e for e in cluster.status()["engines"] if e["spec"] != f"echo?vocab={VOCAB}"]
        victims = Victims(client, doomed["engine"])
        bystander = Decoding(client, victims.others[0])
        bystander.go_on(1)
        victims.load()
        wait_for_end(doomed["pid"], "the engine to come to the point")
        died = time.monotonic()
        assert not wait(victims.futures, WITHIN_S).not_done, "steps of a dead engine did not end"
        wait_until(lambda: victims.sessions[0].ended and victims.sessions[1].ended, "its sessions to be lost", WITHIN_S)
        assert time.monotonic() < died + WITHIN_S
        victims.check()
        bystander.go_on(10)
        wait_until(lambda: states(cluster) == ["ready"] * 2, "the engine to be started again")
        status = cluster.status()
        assert status["ledger"]["balanced"]
        assert (status["ledger"]["queued"], status["ledger"]["in_flight"]) == (0, 0)
        assert [w["restarts"] for w in status["workers"]] == [1, 0]
        with client.open_session(timeout=DEADLINE) as session:
            assert session.engine not in (doomed["engine"], victims.others[0].engine), "the new one has the most room"
            victims.futures.clear()
            # All rows have come back: those that it may have been writing into, and those that were answered.
            rows = [session.submit([t], sampling=None) for t in range(3)]
            for t, row in enumerate(rows):
                logits = row.result(DEADLINE).logits
                assert logits is not None
                assert int(logits.data.argmax()) == answer(advance(0, range(t + 1)), VOCAB)


def test_an_engine_dies_between_two_batches_of_generations(tmp_path: Path) -> None:
    with shmsched.launch(doomed_engine(tmp_path, GOING_ON)) as cluster, cluster.client() as client:
        sessions = [client.open_session(timeout=DEADLINE) for _ in range(2)]
        streams = [session.stream([i], further=100_000) for i, session in enumerate(sessions)]
        for i, stream in enumerate(streams):
            assert stream.wait_until_ended(DEADLINE), "a generation of a dead engine did not end"
            h = advance(0, [i])
            with pytest.raises((shmsched.EngineDied, shmsched.SessionLost)):
                while True:
                    token = stream.next(0).token
                    assert token == answer(h, VOCAB)
                    h = advance(h, [token])
        ledger = cluster.status()["ledger"]
        assert ledger["balanced"]
        assert (ledger["queued"], ledger["in_flight"]) == (0, 0)
        with client.open_session(timeout=DEADLINE) as session:
            assert session.submit([1]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [1]), VOCAB)]


# --- the daemon ---------------------------------------------------------------------------------------------------------


class Story(NamedTuple):
    """How the daemon comes to the point, and what those that survive it are told."""

    go: Callable[[Survivors], None]
    error: type[shmsched.ShmschedError] = shmsched.SchedulerDied
    names_left: int = 0


class Survivors:
    """Clients of both kinds that wait for steps, and for a generation, of an engine that takes its time."""

    def __init__(self, socket: Path, daemon: subprocess.Popen[bytes]) -> None:
        self.socket = socket
        self.daemon = daemon
        self.client = shmsched.Client(socket=socket, wait=DEADLINE)
        wait_until(lambda: len(self.client.models) == 2, "both engines to be ready", DEADLINE)
        # While the engine runs a batch it opens no session.
        session = self.client.open_session(model="slow")
        self.awaited: list[BaseException | object] = []
        self._waiting = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._wait()), name="asynchronous-survivor")
        self.thread.start()
        assert self._waiting.wait(DEADLINE), "the asynchronous client did not come to wait"
        self.futures = [session.submit([t]) for t in range(2)]
        with shmsched.Control(socket) as control:
            status = control.status()
        assert status["ledger"]["submitted"] == 4, "not everything is under way"
        self.engines = {e["model"]: e["pid"] for e in status["engines"]}

    async def _wait(self) -> None:
        async with shmsched.AsyncClient(socket=self.socket) as client:
            sessions = [await client.open_session(model="slow") for _ in range(2)]
            stream = await sessions[0].stream([1], further=10)
            waits = [asyncio.ensure_future(stream.next()), asyncio.ensure_future(sessions[1].submit([1]))]
            # Both have been sent once the answer to a later question is here.
            with suppress(shmsched.NoEngine):
                await client.open_session(model="none", block=False)
            self._waiting.set()
            self.awaited += await asyncio.gather(*waits, return_exceptions=True)

    def close(self) -> None:
        self.client.close()
        self.thread.join(DEADLINE)

    # --- how the daemon comes to its point ------------------------------------------------------------------------------

    def live(self) -> None:
        """One more client lives with the quick engine, until it is over."""
        with (
            suppress(shmsched.SchedulerDied, shmsched.SchedulerUnreachable),
            shmsched.Client(socket=self.socket, arena_bytes=1 << 20) as client,
        ):
            session = client.open_session(model="quick")
            session.submit([1]).result(DEADLINE)
            session.stream([1], further=30).wait_until_ended(DEADLINE)
            session.submit([1], sampling=None).result(DEADLINE)
            session.close()

    def kill_engine(self) -> None:
        os.kill(self.engines["quick"], signal.SIGKILL)

    def stop(self) -> None:
        self.daemon.terminate()

    def stop_at_once(self) -> None:
        self.daemon.terminate()
        with suppress(shmsched.SchedulerDied, shmsched.SchedulerUnreachable), shmsched.Control(self.socket) as control:
            control.stop()
            control.wait_closed(DEADLINE)


LIVING = Story(Survivors.live)
DAEMON_MOMENTS = {
    # Two engines and two clients came before, and the question whether all is under way.
    Moment("daemon.connection.accepted", 6): LIVING,
    Moment("daemon.hello.received", 3): LIVING,
    Moment("daemon.segment.named", 5): Story(Survivors.live, names_left=1),
    Moment("daemon.welcome.half_sent", 3): LIVING,
    Moment("daemon.session.placed", 4): LIVING,
    Moment("daemon.session.opened", 4): LIVING,
    Moment("daemon.tokens.copied", 5): LIVING,
    Moment("daemon.steps.queued", 5): LIVING,
    Moment("daemon.batch.written", 2): LIVING,
    Moment("daemon.work.half_sent", 2): LIVING,
    Moment("daemon.follow.written", 2): LIVING,
    Moment("daemon.done.received"): LIVING,
    Moment("daemon.completions.written"): LIVING,
    Moment("daemon.completions.half_sent"): LIVING,
    Moment("daemon.stream.settled", 2): LIVING,
    Moment("daemon.arena.made"): LIVING,
    Moment("daemon.close_session.received"): LIVING,
    Moment("daemon.client.lost"): LIVING,
    Moment("daemon.engine.lost"): Story(Survivors.kill_engine),
    Moment("daemon.engine.spawned", 3): Story(Survivors.kill_engine),
    Moment("daemon.offer.taken", 3): Story(Survivors.kill_engine),
    Moment("daemon.stopping"): Story(Survivors.stop),
    Moment("daemon.leaving"): Story(Survivors.stop_at_once, shmsched.SchedulerStopped),
}
ENGINES = [
    {"spec": "echo?model=slow&step_us=60000000", "copies": 1},
    {"spec": f"echo?model=quick&vocab={VOCAB}", "copies": 1},
]


@contextmanager
def daemon(moment: Moment, socket: Path) -> Iterator[subprocess.Popen[bytes]]:
    with armed(moment, "-m", "shmsched.daemon") as process:
        settings = {"socket": str(socket), "engines": ENGINES}
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings).encode())
        process.stdin.close()
        yield process


def names_of(pid: int) -> list[str]:
    """What the process has left in /dev/shm, where other tests may be at work."""
    return [name for name in shm_names() if name.startswith(f"shmsched-{pid}-")]


# What one leaves in /dev/shm any other daemon that starts would sweep.
@pytest.mark.alone
@pytest.mark.parametrize("moment", DAEMON_MOMENTS, ids=str)
def test_the_daemon_dies_and_every_future_fails_at_once(tmp_path: Path, moment: Moment) -> None:
    story = DAEMON_MOMENTS[moment]
    with ExitStack() as stack:
        process = stack.enter_context(daemon(moment, tmp_path / "s"))
        survivors = Survivors(tmp_path / "s", process)
        stack.callback(survivors.close)
        story.go(survivors)
        assert process.wait(DEADLINE) == -signal.SIGKILL
        died = time.monotonic()
        assert not wait(survivors.futures, WITHIN_S).not_done, "futures of a dead daemon did not end"
        survivors.thread.join(WITHIN_S)
        assert time.monotonic() < died + WITHIN_S
        errors = [*(f.exception(0) for f in survivors.futures), *survivors.awaited]
        assert [type(e) for e in errors] == [story.error] * 4, errors
        with pytest.raises(story.error):
            survivors.client.open_session()
        for pid in survivors.engines.values():
            wait_until(lambda pid=pid: not runs(pid), "its engines to end", WITHIN_S)
        assert len(names_of(process.pid)) == story.names_left
    # Its socket and what it left in /dev/shm are in nobody's way.
    settings = Moment("daemon.connection.accepted", 1000)
    if story.names_left:
        dead = process.pid
        with daemon(settings, tmp_path / "s") as process:
            shmsched.Client(socket=tmp_path / "s", wait=DEADLINE).close()
            assert names_of(dead) == []
            process.terminate()
            assert process.wait(DEADLINE) == 0

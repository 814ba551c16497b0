"""Peers that are stopped under load, and wake: the others go on, and nobody hears what was too late."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import wait
from typing import Any

import pytest

import shmsched
from shmsched.workers.echo import advance, answer

from faults.decoding import DEADLINE, VOCAB, Decoding
from faults.test_peers import client_process, line, state_of
from processes.leftovers import wait_until

SECONDS = [pytest.param(1.2, id="short"), pytest.param(30.0, marks=pytest.mark.soak, id="30s")]
LONGEST_STEP_S = 1.0
"""That a bystander may wait while somebody else is stopped. It is the machine's load; a step itself takes a millisecond."""

CLIENT = """
import shmsched, sys, threading
from shmsched.workers.echo import advance, answer

over = threading.Event()

def decode(session):
    h, token = 0, 1
    while not over.is_set():
        h = advance(h, [token])
        token = int(session.submit([token]).result(90).tokens[0])
        assert token == answer(h, 1000), "a wrong token"

def generate(session):
    h = 0
    while not over.is_set():
        stream = session.stream([1], further=200)
        h = advance(h, [1])
        for n in range(201):
            token = stream.next(90).token
            assert token == answer(h, 1000), "a wrong token of a generation"
            if n < 200:
                h = advance(h, [token])

client = shmsched.Client(socket=sys.argv[1])
sessions = [client.open_session() for _ in range(12)]
failures = []

def guarded(work, session):
    try:
        work(session)
    except BaseException as e:
        failures.append(e)
        raise

threads = [threading.Thread(target=guarded, args=(decode, s)) for s in sessions[:6]]
threads += [threading.Thread(target=guarded, args=(generate, s)) for s in sessions[6:]]
for thread in threads:
    thread.start()
print("at work", flush=True)
sys.stdin.readline()
over.set()
for thread in threads:
    thread.join()
print("all right" if not failures else failures[0], flush=True)
"""
ASYNC_CLIENT = """
import asyncio, shmsched, sys
from shmsched.workers.echo import advance, answer

over = False

async def decode(session):
    h, token = 0, 1
    while not over:
        h = advance(h, [token])
        token = int((await session.submit([token])).tokens[0])
        assert token == answer(h, 1000), "a wrong token"

async def generate(session):
    h = 0
    while not over:
        stream = await session.stream([1], further=200)
        h = advance(h, [1])
        for n in range(201):
            token = (await stream.next()).token
            assert token == answer(h, 1000), "a wrong token of a generation"
            if n < 200:
                h = advance(h, [token])

async def work():
    global over
    loop = asyncio.get_running_loop()
    async with shmsched.AsyncClient(socket=sys.argv[1]) as client:
        sessions = [await client.open_session() for _ in range(200)]
        tasks = [asyncio.create_task(decode(s)) for s in sessions[::2]]
        tasks += [asyncio.create_task(generate(s)) for s in sessions[1::2]]
        print("at work", flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        over = True
        await asyncio.gather(*tasks)
    print("all right", flush=True)

asyncio.run(work())
"""


def go_on(bystander: Decoding, seconds: float) -> float:
    """Decode for a while. Returns how long the longest step took."""
    longest, begin = 0.0, time.monotonic()
    before = begin
    while before < begin + seconds:
        bystander.go_on(1)
        now = time.monotonic()
        longest, before = max(longest, now - before), now
    return longest


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("program", [CLIENT, ASYNC_CLIENT], ids=["threads", "asyncio"])
def test_a_client_is_stopped_under_load_and_everybody_goes_on(program: str, seconds: float) -> None:
    with (
        shmsched.launch(f"echo?vocab={VOCAB}&step_us=1000") as cluster,
        cluster.client() as client,
        client_process(program, cluster.socket) as stopped,
    ):
        bystander = Decoding(client)
        assert line(stopped) == "at work"
        completed = cluster.status()["ledger"]["completed"]
        wait_until(lambda: cluster.status()["ledger"]["completed"] > completed + 500, "the client to be well under way")
        os.kill(stopped.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(stopped.pid) == "T", "the client to stop")
        assert go_on(bystander, seconds) < LONGEST_STEP_S
        assert cluster.status()["ledger"]["balanced"]
        os.kill(stopped.pid, signal.SIGCONT)
        bystander.go_on(20)
        assert stopped.stdin is not None
        print(file=stopped.stdin, flush=True)
        assert line(stopped) == "all right"
        assert stopped.wait(DEADLINE) == 0


def engine_of(cluster: shmsched.Cluster, session: shmsched.Session) -> dict[str, Any]:
    (engine,) = [e for e in cluster.status()["engines"] if e["engine"] == session.engine]
    return dict(engine)


@pytest.mark.parametrize("seconds", SECONDS)
def test_an_engine_that_is_stopped_for_long_is_a_hang_and_the_others_go_on(seconds: float) -> None:
    """Whatever waits for it ends in its own way, and what it was writing when it was stopped reaches nobody."""
    with (
        shmsched.launch(f"echo?vocab={VOCAB}&step_us=20000", engines=2, step_timeout_s=seconds * 2 / 3) as cluster,
        cluster.client() as client,
    ):
        bystander = Decoding(client)
        opened = [client.open_session() for _ in range(7)]
        victim, streaming, raw, late = [s for s in opened if s.engine != bystander.session.engine]
        stream = streaming.stream([1], further=100_000)
        stream.next(DEADLINE)
        engine = engine_of(cluster, victim)
        futures = [victim.submit([t]) for t in range(5)] + [raw.submit([1], sampling=None)]
        wait_until(lambda: engine_of(cluster, victim)["in_flight"], "a batch to run")
        os.kill(engine["pid"], signal.SIGSTOP)
        stopped = time.monotonic()
        # Not a step of its batch: what is queued behind a hang leaves its queue at its deadline, and not at the hang's end.
        deadline = late.submit([1], deadline=time.monotonic() + seconds / 10)
        with pytest.raises(shmsched.DeadlineExceeded):
            deadline.result(DEADLINE)
        assert time.monotonic() < stopped + seconds / 2
        assert go_on(bystander, max(0.0, stopped + seconds - time.monotonic())) < LONGEST_STEP_S
        # SIGKILL ends a stopped process, too; one that is not there does not mind being continued.
        assert not wait(futures, DEADLINE).not_done
        for future in futures:
            assert future.exception(0) is None or isinstance(
                future.exception(0), shmsched.EngineTimeout | shmsched.SessionLost
            )
        assert isinstance(futures[4].exception(0), shmsched.EngineTimeout | shmsched.SessionLost)
        h = advance(advance(0, [1]), [answer(advance(0, [1]), VOCAB)])
        with pytest.raises((shmsched.EngineTimeout, shmsched.SessionLost)):
            while True:
                token = stream.next(DEADLINE).token
                assert token == answer(h, VOCAB)
                h = advance(h, [token])
        wait_until(lambda: len([e for e in cluster.status()["engines"] if e["state"] == "ready"]) == 2, "a new engine")
        with client.open_session(timeout=DEADLINE) as again:
            response = again.submit([1], sampling=None).result(DEADLINE)
            assert response.logits is not None
            assert int(response.logits.data.argmax()) == answer(advance(0, [1]), VOCAB)
        bystander.go_on(20)
        assert cluster.status()["ledger"]["balanced"]


def test_an_engine_that_is_stopped_for_less_than_the_step_timeout_goes_on_where_it_was() -> None:
    with (
        shmsched.launch(f"echo?vocab={VOCAB}&step_us=5000", step_timeout_s=DEADLINE) as cluster,
        cluster.client() as client,
    ):
        decoding = Decoding(client)
        session = client.open_session()
        futures = [session.submit([t], sampling=None if t % 5 == 0 else shmsched.SamplingParams()) for t in range(50)]
        wait_until(lambda: cluster.status()["engines"][0]["in_flight"], "a batch to run")
        pid = cluster.status()["engines"][0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: state_of(pid) == "T", "the engine to stop")
        done = sum(future.done() for future in futures)
        with shmsched.Control(cluster.socket) as control:
            wait_until(
                lambda: control.status()["engines"][0]["in_flight"]["for_s"] > 0.5, "it to be silent for a while"
            )
        assert sum(future.done() for future in futures) <= done + 1, "one batch may have been on its way"
        os.kill(pid, signal.SIGCONT)
        h = 0
        for token, future in enumerate(futures):
            h = advance(h, [token])
            response = future.result(DEADLINE)
            got = response.tokens if response.logits is None else response.logits.data.argmax(axis=1)
            assert got.tolist() == [answer(h, VOCAB)]
        decoding.go_on(10)

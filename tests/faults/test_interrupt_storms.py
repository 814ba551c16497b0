"""Alarms every few milliseconds around whatever a client does, and exceptions that another thread raises in its threads."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType

import pytest

import shmsched

from faults.striking import Alarm, Interrupt, Struck
from processes.expected import VOCAB, echoes
from processes.leftovers import wait_until

pytestmark = [
    # What an interrupt has kept from whoever asked for it is closed when it is collected, which says so; what is raised in a
    # finalizer Python prints, and raises nowhere.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

DEADLINE = 10.0
STORM_S = 2.5
LONGEST_STORM_S = 60.0
LEAST_ENDED = 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(f"echo?vocab={VOCAB}&step_us=300&max_sessions=8", max_prefill_chunk_size=16) as cluster:
        yield cluster


def storm(
    does: Callable[[], None],
    restores: Callable[[], None],
    error: type[BaseException] = Alarm,
    inside: FunctionType | None = None,
) -> int:
    """Does it again and again, with alarms of which the handler raises inside of it, or inside of what it calls. Returns how many have
    ended it."""
    code = (inside or does).__code__
    ended = 0

    def strike(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.01))
        while frame is not None:
            if frame.f_code is code:
                raise error("time is up")
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, strike)
    hook, sys.unraisablehook = sys.unraisablehook, lambda raised: None
    end = time.monotonic() + STORM_S
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.005)
        # A busy machine may take longer for as many.
        while (now := time.monotonic()) < end or (ended <= LEAST_ENDED and now < end + LONGEST_STORM_S):
            try:
                does()
            except error:
                ended += 1
            except shmsched.ShmschedError:
                restores()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook
    return ended


def _nothing_is_left(cluster: shmsched.Cluster, sessions: list[int]) -> None:
    found: list[object] = []

    def nothing() -> bool:
        gc.collect()
        status = cluster.status()
        found[:] = [(c["sessions"], c["outstanding"]) for c in status["clients"]]
        return found == [(n, 0) for n in sessions] and status["ledger"]["queued"] == status["ledger"]["in_flight"] == 0

    wait_until(nothing, f"clients with {sessions} sessions and nothing outstanding", DEADLINE)


def test_alarms_around_a_client(cluster: shmsched.Cluster, interruptible: None) -> None:
    clients = [shmsched.Client(socket=cluster.socket)]

    def does() -> None:
        with clients[0].open_session(timeout=DEADLINE) as session:
            assert list(session.generate([1, 2], max_new_tokens=3)) == echoes([1, 2], 3)
            session.submit([5]).result(DEADLINE)
            logits = session.submit([6], sampling=None).result(DEADLINE).logits
            assert logits is not None
            logits.release()

    def restores() -> None:
        """Only one that is closed, and says why, may be replaced."""
        with pytest.raises(shmsched.ClientClosed, match="interrupt|Alarm"):
            clients[0].open_session(timeout=DEADLINE)
        clients[0].close()
        clients[0] = shmsched.Client(socket=cluster.socket)

    assert storm(does, restores) > LEAST_ENDED
    with clients[0], clients[0].open_session(timeout=DEADLINE) as session:
        assert list(session.generate([1], max_new_tokens=2)) == echoes([1], 2)
        _nothing_is_left(cluster, [1])
    _nothing_is_left(cluster, [])


def test_alarms_around_a_loop_that_begins_anew(
    cluster: shmsched.Cluster, interruptible: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It says of each task what has ended it.
    monkeypatch.setattr(logging.getLogger("asyncio"), "disabled", True)

    async def use() -> None:
        async with (
            shmsched.AsyncClient(socket=cluster.socket) as client,
            client.open_session(timeout=DEADLINE) as session,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(_decodes(session))
            group.create_task(_generates(client))

    async def _decodes(session: shmsched.AsyncSession) -> None:
        for _ in range(5):
            await session.submit([5])

    async def _generates(client: shmsched.AsyncClient) -> None:
        async with client.open_session(timeout=DEADLINE) as session:
            assert [t async for t in session.generate([1, 2], max_new_tokens=3)] == echoes([1, 2], 3)

    def does() -> None:
        asyncio.run(asyncio.wait_for(use(), DEADLINE))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Nothing else ends a loop: asyncio keeps other exceptions to itself, and loses the task. While it runs: one that is struck as
        # it begins or ends may say for ever that it runs, and asyncio begins no other one.
        assert storm(does, lambda: None, Interrupt, asyncio.BaseEventLoop._run_once) > LEAST_ENDED
    gc.collect()
    asyncio.run(use())
    _nothing_is_left(cluster, [])


@pytest.mark.prints("Traceback")
@pytest.mark.parametrize("whom", ["caller", "receiver"])
def test_another_thread_raises_in_it(cluster: shmsched.Cluster, interruptible: None, whom: str) -> None:
    raises = ctypes.pythonapi.PyThreadState_SetAsyncExc
    with shmsched.Client(socket=cluster.socket) as client:
        session = client.open_session(timeout=DEADLINE)
        over = threading.Event()

        def decodes() -> None:
            while not over.is_set():
                try:
                    while not over.is_set():
                        session.submit([5], position=0).result(DEADLINE)
                except Struck:
                    pass
                except shmsched.ShmschedError:
                    return

        caller = threading.Thread(target=decodes)
        caller.start()
        struck = caller if whom == "caller" else client._receiver
        for _ in range(60):
            time.sleep(random.uniform(0, 0.01))
            if struck.ident is not None and struck.is_alive():
                raises(ctypes.c_ulong(struck.ident), ctypes.py_object(Struck))
        over.set()
        caller.join(2 * DEADLINE)
        assert not caller.is_alive(), "the caller hangs"
        if whom == "receiver":
            with pytest.raises(shmsched.ClientClosed, match="Struck"):
                session.submit([7], position=0)
        else:
            assert session.submit([7], position=0).result(DEADLINE).tokens.tolist() == echoes([7], 1)
    _nothing_is_left(cluster, [])

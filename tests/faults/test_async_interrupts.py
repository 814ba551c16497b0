"""Cancelling at every await, and an interrupt at any line, of what a call of the asynchronous client runs through.

Afterwards the client goes on in its loop, or is closed and says why; and the daemon holds nothing of the dead call.
"""

from __future__ import annotations

import asyncio
import gc
import random
import re
import types
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any

import pytest

import shmsched
from shmsched.client import async_client
from shmsched.client.generation import EngineDraft, PromptLookup
from shmsched.wire.link import Link

from faults.striking import Alarm, Interrupt, Place, Struck, Tracer
from processes.expected import VOCAB, echoes
from processes.leftovers import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

DEADLINE = 10.0
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(f"echo?vocab={VOCAB}&step_us=300&max_sessions=8", max_prefill_chunk_size=16) as cluster:
        yield cluster


Scenario = Callable[[shmsched.AsyncClient, shmsched.AsyncSession], Coroutine[Any, Any, object]]


async def _decode(client: shmsched.AsyncClient, session: shmsched.AsyncSession) -> None:
    for _ in range(2):
        await session.submit([5])


async def _prompt(client: shmsched.AsyncClient, session: shmsched.AsyncSession) -> None:
    await session.submit(list(range(40)))


async def _raw(client: shmsched.AsyncClient, session: shmsched.AsyncSession) -> None:
    for _ in range(2):
        logits = (await session.submit([5], sampling=None)).logits
        assert logits is not None
        logits.release()


async def _open(client: shmsched.AsyncClient, session: shmsched.AsyncSession) -> None:
    async with client.open_session(timeout=DEADLINE) as another:
        await another.submit([5])


async def _fork(client: shmsched.AsyncClient, session: shmsched.AsyncSession) -> None:
    session.submit([5])
    async with session.fork(timeout=DEADLINE) as child:
        await child.submit([6])


async def _time_out(client: shmsched.AsyncClient, session: shmsched.AsyncSession) -> None:
    try:
        async with asyncio.timeout(0.0005):
            await session.submit([5])
            await session.submit([6])
    except TimeoutError as e:
        if isinstance(e, Alarm):
            raise


async def _group(client: shmsched.AsyncClient, session: shmsched.AsyncSession) -> None:
    async def one() -> None:
        async with client.open_session(timeout=DEADLINE) as its:
            await its.submit([5])

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(one())


async def _stream(client: shmsched.AsyncClient, session: shmsched.AsyncSession) -> None:
    stream = await session.stream(PROMPT, further=200)
    await stream.next()
    stream.cancel()


def _generate(**how: Any) -> Scenario:
    async def scenario(client: shmsched.AsyncClient, session: shmsched.AsyncSession) -> None:
        async for _ in session.generate(PROMPT, max_new_tokens=4, **how):
            pass

    return scenario


async def _leave(client: shmsched.AsyncClient, session: shmsched.AsyncSession) -> None:
    async with session.generate(PROMPT, max_new_tokens=200) as generation:
        await anext(generation)


async def _leave_a_loop(client: shmsched.AsyncClient, session: shmsched.AsyncSession) -> None:
    async for _ in session.generate(PROMPT, max_new_tokens=200, continuation=False):
        break


async def _draft(client: shmsched.AsyncClient, session: shmsched.AsyncSession) -> None:
    async with client.open_session(timeout=DEADLINE) as drafter:
        async for _ in session.generate(PROMPT, max_new_tokens=4, draft=EngineDraft(drafter)):
            pass


async def _whole(client: shmsched.AsyncClient, session: shmsched.AsyncSession) -> None:
    async with shmsched.AsyncClient(socket=client._path) as another, another.open_session(timeout=DEADLINE) as its:
        await its.submit([5])


SCENARIOS: dict[str, Scenario] = {
    "decode": _decode,
    "prompt": _prompt,
    "raw": _raw,
    "open": _open,
    "fork": _fork,
    "time out": _time_out,
    "group": _group,
    "stream": _stream,
    "generate": _generate(),
    "step": _generate(continuation=False),
    "process": _generate(logits_processor=lambda tokens, row: row),
    "look-up": _generate(draft=PromptLookup()),
    "replay": _generate(on_session_lost="replay"),
    "stop": _generate(stop_tokens=range(30)),
    "draft": _draft,
    "leave": _leave,
    "leave a loop": _leave_a_loop,
    "whole": _whole,
}


@types.coroutine
def cancelled_at(
    n: int, late: bool, reached: list[int], does: Coroutine[Any, Any, object]
) -> Generator[Any, Any, None]:
    """Does it, and cancels the task at its await number ``n``: as it begins to wait, or (``late``) when what it waits for has come
    and it does not know yet."""
    error: BaseException | None = None
    task = asyncio.current_task()
    assert task is not None
    while True:
        try:
            waits_for = does.send(None) if error is None else does.throw(error)
        except StopIteration:
            return
        reached[0] += 1
        if reached[0] == n:
            if late and waits_for is not None:
                waits_for.add_done_callback(lambda _: task.cancel())
            else:
                task.cancel()
        try:
            error = None
            yield waits_for
        except BaseException as e:
            error = e


class Rig:
    """A client and its session in a loop, made anew where an interrupt has ended them."""

    def __init__(self, cluster: shmsched.Cluster) -> None:
        self.cluster = cluster
        self.loop = asyncio.new_event_loop()
        # What an interrupt does to callbacks and tasks, the loop says; that is not the question here.
        self.loop.set_exception_handler(lambda loop, context: None)
        self.clients_ended: dict[str, str] = {}
        self._run(self._connect())

    def _run(self, does: Awaitable[object]) -> None:
        async def timed() -> None:
            await asyncio.wait_for(does, 3 * DEADLINE)

        self.loop.run_until_complete(timed())

    async def _connect(self) -> None:
        self.client = await shmsched.AsyncClient(socket=self.cluster.socket).connect()
        self.session = await self.client.open_session(timeout=DEADLINE)

    def cancel(self, scenario: Scenario, n: int, late: bool) -> bool:
        """Whether it has so many awaits."""
        reached = [0]

        async def does() -> None:
            await cancelled_at(n, late, reached, scenario(self.client, self.session))

        task = self.loop.create_task(does())
        try:
            self._run(asyncio.wait([task]))
            if not task.cancelled():
                task.result()
        except shmsched.StepCancelled:
            # Of what was submitted before.
            pass
        # Its exception keeps what its frames have.
        del task
        if reached[0] >= n:
            self._look_after(f"await {n}{', late' if late else ''}")
        return reached[0] >= n

    def strike(self, scenario: Scenario, place: Place, instructions: bool, error: type[BaseException]) -> bool:
        tracer = Tracer(place, instructions=instructions, error=error)
        task = self.loop.create_task(scenario(self.client, self.session))
        try:
            with tracer.following():
                self.loop.run_until_complete(asyncio.wait_for(task, DEADLINE))
        except BaseException as e:
            if not tracer.struck:
                raise AssertionError(f"{place}: {e!r}") from e
        if tracer.struck:
            del task
            self._end_tasks()
            self._look_after(str(place))
        return tracer.struck

    def _end_tasks(self) -> None:
        """As ``asyncio.run`` does."""
        while True:
            try:
                self.loop.run_until_complete(asyncio.sleep(0))
                tasks = asyncio.all_tasks(self.loop)
                if not tasks:
                    return
                for task in tasks:
                    task.cancel()
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=DEADLINE))
            except (Interrupt, RuntimeError):
                # A task that waits for the one that was struck hands it on; and what ended in the turn that was struck stops the
                # next one.
                pass

    def _look_after(self, place: str) -> None:
        gc.collect()
        self._run(self._goes_on(place))
        self._run(self._nothing_is_left(place))

    async def _goes_on(self, place: str) -> None:
        try:
            await self._works(self.session, place)
        except shmsched.ClientClosed as e:
            self.clients_ended[place] = str(e)
            await self.client.close()
            await self._connect()
            await self._works(self.session, place)
        except shmsched.ShmschedError:
            await self.session.close()
            self.session = await self.client.open_session(timeout=DEADLINE)
            await self._works(self.session, place)

    async def _works(self, session: shmsched.AsyncSession, place: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE):
                response = await session.submit([7], position=0)
                assert response.tokens.tolist() == echoes([7], 1), place
                assert [t async for t in session.generate([8], max_new_tokens=2)] == echoes([7, 8], 2), place
        except TimeoutError as e:
            raise AssertionError(f"{place}: the session hangs") from e

    async def _nothing_is_left(self, place: str) -> None:
        end = self.loop.time() + DEADLINE
        while True:
            status = self.cluster.status()
            found = [(c["sessions"], c["outstanding"]) for c in status["clients"]]
            if found == [(1, 0)] and status["ledger"]["queued"] == status["ledger"]["in_flight"] == 0:
                break
            assert self.loop.time() < end, f"{place}: one client with one session is wanted; there are {found}"
            await asyncio.sleep(0.002)
        arena = self.client._channel.arena
        if arena is not None:
            arena._collect()
            assert (arena.leased, arena._allocator.held) == (0, 0), f"{place}: rows are held"
        assert self.client._channel.outstanding == 0, place

    def places(self, scenario: Scenario, instructions: bool) -> list[Place]:
        """Those that the scenario comes to when it has been run once."""
        self._run(scenario(self.client, self.session))
        tracer = Tracer(instructions=instructions)
        with tracer.following():
            self._run(scenario(self.client, self.session))
        return [place for place in tracer.reached if instructions == (place[2] >= 0)]

    def close(self) -> None:
        self._run(self.client.close())
        self.loop.close()


@pytest.fixture
def rig(cluster: shmsched.Cluster, interruptible: None) -> Iterator[Rig]:
    rig = Rig(cluster)
    with warnings.catch_warnings():
        # What an interrupt has kept from whoever asked for it is closed when it is collected, which says so.
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        yield rig
        rig.close()


@pytest.mark.parametrize("name", SCENARIOS)
def test_cancelled_at_every_await(rig: Rig, name: str) -> None:
    for late in False, True:
        n = 1
        while n < 60 and rig.cancel(SCENARIOS[name], n, late):
            n += 1
        assert n > 1
    assert not rig.clients_ended


@pytest.mark.parametrize("name", SCENARIOS)
def test_at_some_places(rig: Rig, name: str) -> None:
    for place in random.sample(rig.places(SCENARIOS[name], True), 6):
        rig.strike(SCENARIOS[name], place, True, random.choice([Interrupt, Alarm]))
    assert len(rig.clients_ended) <= 1, rig.clients_ended


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("error", [Interrupt, Alarm])
def test_at_every_line(rig: Rig, name: str, error: type[BaseException]) -> None:
    struck = sum([rig.strike(SCENARIOS[name], place, False, error) for place in rig.places(SCENARIOS[name], False)])
    assert struck > 100
    assert len(rig.clients_ended) <= struck // 50, rig.clients_ended


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCENARIOS)
def test_at_random_instructions(rig: Rig, name: str) -> None:
    found = rig.places(SCENARIOS[name], True)
    chosen = random.sample(found, min(1000, len(found)))
    struck = sum([rig.strike(SCENARIOS[name], place, True, random.choice([Interrupt, Alarm])) for place in chosen])
    assert struck > 100
    assert len(rig.clients_ended) <= struck // 50, rig.clients_ended


CLOSE = (
    shmsched.AsyncClient.close, shmsched.AsyncClient._close_up, async_client._stop_watching, async_client._forget,
    Link.close, Link.abandon,
)  # fmt: skip


def test_whoever_closes_hears_of_the_interrupt_and_of_nothing_else(
    cluster: shmsched.Cluster, interruptible: None
) -> None:
    lines = {(f.__code__.co_filename, line) for f in CLOSE for _, _, line in f.__code__.co_lines()}

    async def closes(tracer: Tracer) -> None:
        client = await shmsched.AsyncClient(socket=cluster.socket).connect()
        try:
            with tracer.following():
                await client.close()
        finally:
            await client.close()
            assert client._link.closed

    seen = Tracer(instructions=True)
    asyncio.run(closes(seen))
    places = [place for place in seen.reached if place[2] >= 0 and place[:2] in lines]
    assert len(places) > 50
    for place in places:
        with pytest.raises(Struck, match=re.escape(str(place))):
            asyncio.run(closes(Tracer(place, instructions=True)))
    wait_until(lambda: cluster.status()["clients"] == [], "the daemon to see that all have gone", DEADLINE)

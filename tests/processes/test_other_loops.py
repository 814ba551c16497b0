"""An AsyncClient belongs to the loop that it was connected in: elsewhere each call is refused, and nothing has happened."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvloop

import shmsched

from processes.expected import VOCAB, echoes
from processes.leftovers import wait_until
from processes.loops import DEADLINE, Run

Uses = dict[str, Callable[[], Any]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(f"echo?vocab={VOCAB}&max_sessions=8&step_us=200") as cluster:
        yield cluster


def sessions_held(cluster: shmsched.Cluster) -> int:
    return sum(engine["sessions"] for engine in cluster.status()["engines"])


class Used:
    """A client in its loop, and everything that hangs off it."""

    def __init__(self, client: shmsched.AsyncClient, session: shmsched.AsyncSession) -> None:
        self.client = client
        self.session = session
        self.generation = session.generate([1, 2], max_new_tokens=5)
        self.uses: Uses = {}

    async def prepare(self) -> None:
        client, session = self.client, self.session
        self.other = await client.open_session()
        self.stream = await self.other.stream([3], further=1000)
        self.third = await client.open_session()
        self.step = self.third.submit([4])
        self.unused = session.generate([7], max_new_tokens=2)
        generation, stream = self.generation, self.stream

        async def enter(what: Any) -> None:
            async with what:
                pass

        async def loop_over(what: Any) -> None:
            async for _ in what:
                pass

        self.uses = {
            "connect": client.connect,
            "async with client": lambda: enter(client),
            "client.close": client.close,
            "open_session": client.open_session,
            "generate_text": lambda: client.generate_text("x"),
            "submit": lambda: session.submit([1]),
            "submit raw": lambda: session.submit([1], sampling=None),
            "stream": lambda: session.stream([1], further=3),
            "generate": lambda: session.generate([1], max_new_tokens=3),
            "fork": session.fork,
            "reopen": session.reopen,
            "session.close": session.close,
            "async with session": lambda: enter(session),
            "a step, awaited elsewhere": lambda: self.step,
            "stream.next": stream.next,
            "stream.cancel": stream.cancel,
            "stream.halt": stream.halt,
            "stream.wait_until_ended": stream.wait_until_ended,
            "anext(generation)": generation.__anext__,
            "async for generation": lambda: loop_over(generation),
            "increments": lambda: loop_over(generation.increments()),
            "aclose": generation.aclose,
            "async with generation": lambda: enter(generation),
            "aclose of one that has not begun": self.unused.aclose,
        }

    def prepare_opening(self) -> None:
        """One that must be awaited some time, as any coroutine."""
        self.opening = self.client.open_session()

        async def enter() -> None:
            async with self.opening:
                pass

        async def wait() -> None:
            await self.opening

        self.uses |= {"an opening, entered elsewhere": enter, "an opening, awaited elsewhere": wait}

    async def goes_on(self) -> None:
        assert (await self.step).tokens.tolist() == echoes([4], 1)
        assert [token async for token in self.generation] == echoes([1, 2], 5)
        assert (await self.stream.next()).token == echoes([3], 1)[0]
        self.stream.cancel()
        async with self.opening as opened:
            assert (await opened.submit([9])).tokens.tolist() == echoes([9], 1)
        await self.other.close()
        await self.third.close()


async def refused(uses: Uses) -> dict[str, BaseException | None]:
    """What each use raises in the loop that this runs in."""
    raised: dict[str, BaseException | None] = {}
    for name, use in uses.items():
        raised[name] = None
        try:
            async with asyncio.timeout(DEADLINE):
                came = use()
                if isinstance(came, Awaitable):
                    await came
        except Exception as e:
            raised[name] = e
    return raised


def in_a_thread(use: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            use()
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=run, name="another thread")
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive(), f"waited {DEADLINE:g} s for the calls from another thread"
    if failed:
        raise failed[0]


@pytest.mark.parametrize("elsewhere", ["asyncio", "uvloop"])
@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
def test_another_threads_loop_is_refused_and_the_rightful_one_goes_on(
    cluster: shmsched.Cluster, run: Run, elsewhere: str, debug: bool
) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_debug(debug)
        before = sessions_held(cluster)
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session() as session:
            used = Used(client, session)
            await used.prepare()
            used.prepare_opening()
            held = sessions_held(cluster)
            raised: dict[str, BaseException | None] = {}
            others: list[str] = []

            async def use() -> None:
                others.append(hex(id(asyncio.get_running_loop())))
                raised.update(await refused(used.uses))

            def other() -> None:
                factory = uvloop.new_event_loop if elsewhere == "uvloop" else None
                with asyncio.Runner(loop_factory=factory, debug=debug) as runner:
                    runner.run(use())

            await asyncio.to_thread(in_a_thread, other)
            own = hex(id(asyncio.get_running_loop()))
            for name, error in raised.items():
                if name == "connect" or name == "async with client":
                    assert isinstance(error, shmsched.InvalidRequest), (name, error)
                    continue
                assert isinstance(error, shmsched.WrongLoop), (name, error)
                for word in (own, others[0], "MainThread", "another thread"):
                    assert word in str(error), (name, word)
            assert sessions_held(cluster) == held
            assert client._channel.outstanding <= 2, "nothing was submitted elsewhere"
            await used.goes_on()
        wait_until(lambda: sessions_held(cluster) == before, "every slot to be free again")

    run(main())


def test_no_loop_at_all_is_refused(cluster: shmsched.Cluster, run: Run) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session() as session:
            used = Used(client, session)
            await used.prepare()
            used.prepare_opening()
            direct = ("open_session", "generate_text", "submit", "submit raw", "stream", "generate", "fork")

            def without() -> None:
                for name in (*direct, "stream.cancel", "stream.halt"):
                    with pytest.raises(shmsched.WrongLoop, match="in no event loop"):
                        used.uses[name]()

            await asyncio.to_thread(in_a_thread, without)
            await used.goes_on()

    run(main())


def test_a_later_run_is_refused_and_close_gives_everything_back(cluster: shmsched.Cluster, run: Run) -> None:
    kept: list[Used] = []
    before = sessions_held(cluster)

    async def first() -> None:
        client = await shmsched.AsyncClient(socket=cluster.socket).connect()
        used = Used(client, await client.open_session())
        await used.prepare()
        kept.append(used)

    async def second() -> None:
        used = kept[0]
        del used.uses["client.close"], used.uses["connect"], used.uses["async with client"]
        for name, error in (await refused(used.uses)).items():
            assert isinstance(error, shmsched.WrongLoop), (name, error)
            assert "that one is closed" in str(error), name
        assert sessions_held(cluster) > before
        await used.client.close()
        with pytest.raises(shmsched.ShmschedError):
            used.session.submit([1])

    run(first())
    run(second())
    wait_until(lambda: sessions_held(cluster) == before, "a client of a loop that is closed to be closed")


@pytest.mark.parametrize("closed", [True, False], ids=["after its loop is closed", "in another thread"])
def test_collected_elsewhere_it_closes(cluster: shmsched.Cluster, run: Run, closed: bool) -> None:
    before, clients = sessions_held(cluster), len(cluster.status()["clients"])
    kept: list[Any] = []

    async def main() -> None:
        client = await shmsched.AsyncClient(socket=cluster.socket).connect()
        used = Used(client, await client.open_session())
        await used.prepare()
        await used.generation.__anext__()
        await used.step
        kept.append(used)
        del client, used
        if not closed:

            def drop() -> None:
                kept.clear()
                gc.collect()

            await asyncio.to_thread(in_a_thread, drop)
            deadline = asyncio.get_running_loop().time() + DEADLINE
            while sessions_held(cluster) > before:
                assert asyncio.get_running_loop().time() < deadline, "waited in vain for dropped sessions to close"
                await asyncio.sleep(0.01)

    run(main())
    kept.clear()
    gc.collect()
    wait_until(lambda: sessions_held(cluster) == before, "dropped sessions to close")
    wait_until(lambda: len(cluster.status()["clients"]) == clients, "a dropped client to close")


def test_entered_twice_or_while_it_is_being_entered(cluster: shmsched.Cluster, run: Run) -> None:
    async def main() -> None:
        client = shmsched.AsyncClient(socket=cluster.socket)
        first, second = await asyncio.gather(client.connect(), client.connect(), return_exceptions=True)
        assert first is client
        assert isinstance(second, shmsched.InvalidRequest)
        async with asyncio.timeout(DEADLINE):
            with pytest.raises(shmsched.InvalidRequest, match="connected already"):
                async with client:
                    pass
        async with client.open_session() as session:
            assert (await session.submit([1])).tokens.tolist() == echoes([1], 1)
        await client.close()
        await client.close()
        with pytest.raises(shmsched.InvalidRequest, match="connected already"):
            await client.connect()

    run(main())


def test_a_connect_that_failed_may_be_tried_again(cluster: shmsched.Cluster, run: Run) -> None:
    async def main() -> None:
        client = shmsched.AsyncClient(socket=f"{cluster.socket}.none")
        for _ in range(2):
            with pytest.raises(shmsched.SchedulerUnreachable):
                await client.connect()

    run(main())


def test_before_it_is_connected(run: Run) -> None:
    client = shmsched.AsyncClient(socket="/nowhere")
    with pytest.raises(shmsched.InvalidRequest, match="not connected"):
        client.open_session()

    async def main() -> None:
        with pytest.raises(shmsched.InvalidRequest, match="not connected"):
            await client.open_session()
        with pytest.raises(shmsched.InvalidRequest, match="not connected"):
            client.generate_text("x")

    run(main())


def test_a_closed_client_is_not_entered_again(cluster: shmsched.Cluster) -> None:
    client = shmsched.Client(socket=cluster.socket)
    with client:
        client.open_session().close()
    with pytest.raises(shmsched.ClientClosed), client:
        pass

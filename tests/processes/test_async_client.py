"""AsyncClient: the same promises as Client's, on the loop's own reader, without a thread."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shmsched

from processes.expected import VOCAB, echoes
from processes.loops import Run


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(
        f"echo?vocab={VOCAB}&max_sessions=256&max_session_tokens=20000", max_prefill_chunk_size=16
    ) as cluster:
        yield cluster


def test_steps_streams_raw_logits_and_forks(cluster: shmsched.Cluster, run: Run) -> None:
    async def main() -> None:
        before = threading.active_count()
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session(seed=1) as session:
            prompt = list(range(40))
            assert (await session.submit(prompt)).tokens.tolist() == echoes(prompt, 1)
            raw = await session.submit([5], sampling=None)
            assert raw.logits is not None
            assert raw.logits.data.shape == (1, VOCAB)
            assert int(raw.logits.data[0].argmax()) == echoes([*prompt, 5], 1)[0]
            child = await session.fork(20)
            assert (child.position, session.position) == (20, 41)
            assert (await child.submit([9])).tokens.tolist() == echoes([*prompt[:20], 9], 1)
            async with child.fork(1) as grandchild:
                assert (await grandchild.submit([9])).tokens.tolist() == echoes([0, 9], 1)
            with pytest.raises(shmsched.SessionClosed):
                await grandchild.submit([1])
            stream = await session.stream([6, 7], further=25)
            got = [(await stream.next()).token for _ in range(26)]
            assert got == echoes([*prompt, 5, 6, 7], 26)
            assert stream.last
            assert threading.active_count() == before, "it uses the loop's reader, and no thread"

    run(main())


def test_a_thousand_generations_at_once_are_all_right(cluster: shmsched.Cluster, run: Run) -> None:
    """256 sessions at a time; the others wait for a slot."""

    async def one(client: shmsched.AsyncClient, i: int) -> None:
        async with client.open_session() as session:
            stream = await session.stream([i % VOCAB, i // 7], further=23)
            assert [(await stream.next()).token for _ in range(24)] == echoes([i % VOCAB, i // 7], 24)

    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, asyncio.TaskGroup() as tasks:
            for i in range(1000):
                tasks.create_task(one(client, i))

    run(main())


def test_cancelling_a_task_cancels_its_step_and_the_session_goes_on_from_before_it(run: Run) -> None:
    async def main(socket: str) -> None:
        async with shmsched.AsyncClient(socket=socket) as client, client.open_session() as session:
            await session.submit([1, 2])
            first = asyncio.create_task(session.submit([3]))
            second = asyncio.create_task(session.submit([4]))
            await asyncio.sleep(0)
            assert session.position == 4
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            # It was meant to follow a step that did not happen; nobody cancelled its task.
            with pytest.raises(shmsched.StepCancelled):
                await second
            assert session.position == 2
            assert (await session.submit([8])).tokens.tolist() == echoes([1, 2, 8], 1)

    with shmsched.launch(f"echo?vocab={VOCAB}&step_us=20000") as cluster:
        run(main(cluster.socket))


def test_tasks_that_wait_for_room_go_in_order_and_full_is_said(cluster: shmsched.Cluster, run: Run) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session() as session:
            # Three of these do not fit the token ring at once.
            prompt = [1] * 100
            tasks = [asyncio.create_task(session.submit(np.full(19_000, i, np.int32), position=0)) for i in range(20)]
            await asyncio.sleep(0)
            with pytest.raises(shmsched.Full, match="submit with block=True"):
                await session.submit(prompt, position=0, block=False)
            with pytest.raises(shmsched.Full, match=r"waiting 0\.001 s"):
                await session.submit(prompt, position=0, block_timeout=0.001)
            answers = [(await task).tokens.tolist() for task in tasks]
            assert answers == [echoes([i] * 19_000, 1) for i in range(20)]

    run(main())


@pytest.mark.parametrize("wanted", [{}, {"output_rows": shmsched.OutputRows.ALL}])
def test_nobody_goes_before_those_who_wait_for_room(
    cluster: shmsched.Cluster, run: Run, wanted: dict[str, Any]
) -> None:
    """Not in the moment either in which one of them has gone and the next one is not awake yet."""

    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session() as session:
            await session.submit([1])
            async with client._next_in_line():
                waiting = asyncio.create_task(session.submit([2]))
                await asyncio.sleep(0)
                late = asyncio.create_task(session.submit([3], **wanted))
            assert (await late).tokens.tolist() == echoes([1, 2, 3], 1)
            assert (await waiting).tokens.tolist() == echoes([1, 2], 1)

    run(main())


def test_without_a_slot_opening_waits_or_says_full_and_a_cancelled_one_leaves_nothing(run: Run) -> None:
    async def main(socket: str) -> None:
        async with shmsched.AsyncClient(socket=socket) as client:
            held = await client.open_session()
            with pytest.raises(shmsched.Full):
                await client.open_session(block=False)
            with pytest.raises(shmsched.Full, match=r"within 0\.01 s"):
                await client.open_session(timeout=0.01)
            waiting = asyncio.ensure_future(client.open_session())
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            next_one = asyncio.ensure_future(client.open_session())
            await held.close()
            async with await next_one as session:
                assert (await session.submit([4])).tokens.tolist() == echoes([4], 1)
            with pytest.raises(shmsched.SessionClosed):
                await session.submit([4])

    with shmsched.launch(f"echo?vocab={VOCAB}&max_sessions=1") as cluster:
        run(main(cluster.socket))


def test_what_cannot_run_is_refused_in_words(cluster: shmsched.Cluster, run: Run) -> None:
    async def main() -> None:
        client = shmsched.AsyncClient(socket=cluster.socket)
        with pytest.raises(shmsched.InvalidRequest, match="not connected"):
            await client.open_session()
        async with client, client.open_session() as session:
            with pytest.raises(shmsched.InvalidRequest, match=str(VOCAB)):
                await session.submit([VOCAB])
            with pytest.raises(shmsched.InvalidRequest, match="goes on at 0"):
                await session.submit([1], position=3)
            with pytest.raises(shmsched.DeadlineExceeded):
                await session.submit([1], deadline=time.monotonic() - 1)
            with pytest.raises(shmsched.NoEngine):
                await client.open_session(model="none such")
            assert session.position == 0
        with pytest.raises(shmsched.ClientClosed):
            await client.open_session()
        with pytest.raises(shmsched.SchedulerUnreachable):
            await shmsched.AsyncClient(socket="/tmp/none-such.sock", wait=0.05).connect()

    run(main())


def test_the_daemons_death_fails_everything_that_is_awaited(run: Run) -> None:
    async def main(cluster: shmsched.Cluster) -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session() as session:
            other = await client.open_session()
            step = asyncio.ensure_future(session.submit([1]))
            stream = await other.stream([1], further=10_000)
            await asyncio.sleep(0.02)
            os.kill(cluster.pid, signal.SIGKILL)
            with pytest.raises(shmsched.SchedulerDied):
                await step
            with pytest.raises(shmsched.SchedulerDied):
                while True:
                    await stream.next()
            with pytest.raises(shmsched.SchedulerDied):
                await session.submit([1])

    with shmsched.launch(f"echo?vocab={VOCAB}&step_us=300000") as cluster:
        run(main(cluster))


def test_closing_fails_what_is_outstanding_and_leases_stay_readable(cluster: shmsched.Cluster, run: Run) -> None:
    async def main() -> None:
        client = await shmsched.AsyncClient(socket=cluster.socket).connect()
        session = await client.open_session()
        block = (await session.submit([1], sampling=None)).logits
        assert block is not None
        step = asyncio.ensure_future(session.submit([1] * 10_000))
        await asyncio.sleep(0)
        await client.close()
        await client.close()
        with pytest.raises(shmsched.ClientClosed):
            await step
        assert int(block.data[0].argmax()) == echoes([1], 1)[0]

    run(main())


def test_what_is_submitted_while_the_arena_is_made_comes_after_the_step_that_asked_for_it(
    cluster: shmsched.Cluster, run: Run
) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session() as session:
            await asyncio.gather(session.submit([1], sampling=None), session.submit([2]), session.submit([3]))
            assert session.history.tolist() == [1, 2, 3]

    run(main())

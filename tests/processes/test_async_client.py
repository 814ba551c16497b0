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
from processes.loops import DEADLINE, Run


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


def test_an_opening_may_be_a_task(cluster: shmsched.Cluster, run: Run) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client:
            async with asyncio.TaskGroup() as tasks:
                opening = [tasks.create_task(client.open_session()) for _ in range(3)]
            sessions = [task.result() for task in opening]
            await sessions[0].submit([1, 2])
            child = await asyncio.create_task(sessions[0].fork(1))
            assert child.position == 1
            for session in (*sessions, child):
                await session.close()
            held = [await client.open_session() for _ in range(256)]
            waits = asyncio.create_task(client.open_session())
            await asyncio.sleep(0)
            has_not_begun = asyncio.create_task(client.open_session())
            for task in (waits, has_not_begun):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            for session in held:
                await session.close()
            assert not client._state.opening
            assert not client._state.sessions

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


def test_steps_are_submitted_in_the_order_of_the_calls(cluster: shmsched.Cluster, run: Run) -> None:
    """Whichever is awaited first, and also if none is."""

    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session() as session:
            first, second = session.submit([1]), session.submit([2, 3])
            third = session.submit([4], sampling=None)
            stream = session.stream([5], further=2)
            assert session.position == 3, "the first raw step waits for the arena, and the stream stands behind it"
            assert [(await (await stream).next()).token for _ in range(3)] == echoes([1, 2, 3, 4, 5], 3)
            logits = (await third).logits
            assert logits is not None
            assert int(logits.data[0].argmax()) == echoes([1, 2, 3, 4], 1)[0]
            assert (await second).tokens.tolist() == echoes([1, 2, 3], 1)
            assert (await first).tokens.tolist() == echoes([1], 1)
            assert (await first).tokens.tolist() == echoes([1], 1)
            session.submit([9], position=0)
            assert (await session.submit([8])).tokens.tolist() == echoes([9, 8], 1)

    run(main())


def test_what_is_submitted_is_a_coroutine_to_whoever_takes_one(cluster: shmsched.Cluster, run: Run) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session() as session:
            steps = [session.submit([i], position=0) for i in range(4)]
            task = asyncio.create_task(steps[0])
            one = await asyncio.wait_for(steps[1], DEADLINE)
            two, three = await asyncio.gather(steps[2], steps[3])
            answers = [response.tokens.tolist() for response in (await task, one, two, three)]
            assert answers == [echoes([i], 1) for i in range(4)]

    run(main())


def test_refusals_are_raised_by_the_call(cluster: shmsched.Cluster, run: Run) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session() as session:
            with pytest.raises(shmsched.InvalidRequest, match="outside the vocabulary"):
                session.submit([VOCAB])
            with pytest.raises(shmsched.InvalidRequest, match="position is 5; .*goes on at 0"):
                session.submit([1], position=5)
            assert (await session.submit([1])).tokens.tolist() == echoes([1], 1)
        with pytest.raises(shmsched.ClientClosed):
            session.submit([1])

    run(main())


def test_a_task_cancelled_before_it_began_cancels_its_step(run: Run) -> None:
    async def main(socket: str) -> None:
        async with shmsched.AsyncClient(socket=socket) as client, client.open_session() as session:
            await session.submit([1])
            task = asyncio.create_task(session.submit([2]))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert session.position == 1
            waiting = [session.submit(np.full(19_000, i, np.int32), position=1) for i in range(20)]
            last = asyncio.create_task(waiting[-1])
            await asyncio.sleep(0)
            last.cancel()
            with pytest.raises(asyncio.CancelledError):
                await last
            with pytest.raises(shmsched.StepCancelled):
                await waiting[-1]
            for i, step in enumerate(waiting[:-1]):
                assert (await step).tokens.tolist() == echoes([1, *[i] * 19_000], 1)

    with shmsched.launch(f"echo?vocab={VOCAB}&step_us=2000", max_prefill_chunk_size=8192) as cluster:
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
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session() as session:
            # More than the token ring holds: the last of them wait, whoever comes next for one cell of it behind them.
            prompts = [session.submit(np.full(19_000, i, np.int32), position=0) for i in range(20)]
            later = [session.submit([2], **wanted), session.submit([3], **wanted)]
            answers = [(await step).tokens.tolist() for step in reversed([*prompts, *later])]
            fed = [19] * 19_000
            assert answers[:3] == [echoes([*fed, 2, 3], 1), echoes([*fed, 2], 1), echoes(fed, 1)]

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

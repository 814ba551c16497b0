"""Generations of an asynchronous client: the same plans, run by a task."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shmsched
from shmsched.client import AsyncGeneration
from shmsched.client.generation import EngineDraft, FinishReason, PromptLookup

from processes.engines import Reciter
from processes.expected import VOCAB, echoes
from processes.loops import DEADLINE, Run

ENGINES = Path(__file__).with_name("engines.py")
WAYS: dict[str, dict[str, Any]] = {
    "continuation": {},
    "client-driven": {"continuation": False},
    "processed": {"logits_processor": lambda tokens, row: row},
    "drafted": {"draft": PromptLookup()},
}
way_of = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    spec = f"echo?vocab={VOCAB}&max_session_tokens=3000"
    with shmsched.launch(
        spec, f"{spec}&model=small", f"{ENGINES}:Reciter?times=3", max_prefill_chunk_size=16
    ) as cluster:
        yield cluster


async def collect(generation: AsyncGeneration) -> list[int]:
    return [token async for token in generation]


async def until(condition: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"waited 10 s in vain for {what}") from None


@way_of
def test_each_token_follows_from_the_last_and_a_second_generation_goes_on(
    cluster: shmsched.Cluster, run: Run, way: dict[str, Any]
) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session(model="echo") as session:
            prompt = list(range(40))
            generation = session.generate(prompt, max_new_tokens=12, **way)
            assert await collect(generation) == generation.tokens == echoes(prompt, 12)
            assert generation.finish_reason is FinishReason.LENGTH
            assert session.position == 51
            assert await collect(session.generate([], max_new_tokens=5, **way)) == echoes(prompt, 17)[12:]
            assert generation.timings.time_to_first_token is not None
            assert 0 < generation.timings.time_to_first_token < DEADLINE

    run(main())


def test_a_thousand_at_once_are_all_right(cluster: shmsched.Cluster, run: Run) -> None:
    async def one(client: shmsched.AsyncClient, i: int) -> None:
        async with client.open_session(model="echo") as session:
            assert await collect(session.generate([i, i // 7], max_new_tokens=25)) == echoes([i % VOCAB, i // 7], 25)

    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client:
            await asyncio.gather(*(one(client, i) for i in range(1000)))

    run(main())
    ledger = cluster.status()["ledger"]
    assert ledger["balanced"]
    assert ledger["queued"] == ledger["in_flight"] == 0


@way_of
def test_leaving_the_loop_or_the_block_cancels(cluster: shmsched.Cluster, run: Run, way: dict[str, Any]) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session(model="echo") as session:
            expected = echoes([1, 2, 3], 30)
            generation = session.generate([1, 2, 3], max_new_tokens=2000, **way)
            n = 0
            async for _ in generation:
                n += 1
                if n == 4:
                    break
            await until(lambda: generation.finish_reason, "the generation that was left to be cancelled")
            assert generation.finish_reason is FinishReason.CANCELLED
            assert (session.position, session.unfed) == (6, expected[3])
            async with session.generate([], max_new_tokens=2000, **way) as generation:
                assert [await anext(generation) for _ in range(2)] == expected[4:6]  # type: ignore[call-overload]
            assert (session.position, session.unfed) == (8, expected[5])
            never = session.generate([], max_new_tokens=5, **way)
            await never.aclose()
            assert never.finish_reason is FinishReason.CANCELLED
            assert await collect(never) == []
            assert await collect(session.generate([], max_new_tokens=3, **way)) == expected[6:9]
            assert (await session.submit([9])).tokens.tolist() == echoes([1, 2, 3, *expected[:8], 9], 1)

    run(main())


@way_of
def test_cancelling_the_task_cancels_the_generation(cluster: shmsched.Cluster, run: Run, way: dict[str, Any]) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session(model="echo") as session:
            for _ in range(5):
                start = session.position
                generation = session.generate([5], max_new_tokens=2500 - start, **way)
                task = asyncio.create_task(collect(generation))
                await until(lambda: len(generation.tokens) > 10, "some tokens")  # noqa: B023
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert generation.finish_reason is FinishReason.CANCELLED
                assert session.unfed == generation.tokens[-1]
                history = session.history.tolist()
                assert history[len(history) - len(generation.tokens) + 1 :] == generation.tokens[:-1]
                (rest,) = await collect(session.generate([], max_new_tokens=1))
                assert [rest] == echoes([*history, generation.tokens[-1]], 1)

    run(main())


def test_one_that_nobody_refers_to_is_cancelled(cluster: shmsched.Cluster, run: Run) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session(model="echo") as session:
            generation = session.generate([1, 2], max_new_tokens=2500)
            first = await generation.__anext__()
            del generation
            gc.collect()
            await until(lambda: session.unfed == first, "the collected generation to be cancelled")
            assert session.position == 2

    run(main())


def test_an_engine_drafts_and_raw_logits_verify(cluster: shmsched.Cluster, run: Run) -> None:
    async def main() -> None:
        async with (
            shmsched.AsyncClient(socket=cluster.socket) as client,
            client.open_session(model="echo") as session,
            client.open_session(model="small") as small,
        ):
            sampling = shmsched.SamplingParams(1.0, seed=1)
            generation = session.generate([1, 2], max_new_tokens=30, draft=EngineDraft(small), sampling=sampling)
            assert await collect(generation) == echoes([1, 2], 30)

    run(main())


def test_text(cluster: shmsched.Cluster, run: Run) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client:
            text = [text async for text in client.generate_text("na", model="reciter", stop=["END"])]
            assert "".join(text) == "ïve 日本 🙂 "
            async for increment in client.generate_text("na", model="reciter", max_new_tokens=1000):
                assert increment == "ï"
                break
            await until(lambda: not client._state.sessions, "the session of a text that was left to be closed")
            assert Reciter.TEXT.startswith("naï")

    run(main())


@way_of
def test_killing_engines_costs_a_pause_and_no_token(run: Run, way: dict[str, Any]) -> None:
    async def main(cluster: shmsched.Cluster) -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session() as session:
            generation = session.generate([1, 2, 3], max_new_tokens=50, on_session_lost="replay", **way)
            tokens = []
            async for token in generation:
                tokens.append(token)
                if len(tokens) in (10, 30):
                    engines = cluster.status()["engines"]
                    os.kill(next(e["pid"] for e in engines if e["engine"] == session.engine), signal.SIGKILL)
            assert tokens == echoes([1, 2, 3], 50)

    with shmsched.launch(f"echo?vocab={VOCAB}&step_us=1000", engines=2) as cluster:
        run(main(cluster))


def test_the_clients_end_ends_it_with_the_reason(cluster: shmsched.Cluster, run: Run) -> None:
    async def main() -> None:
        client = await shmsched.AsyncClient(socket=cluster.socket).connect()
        session = await client.open_session(model="echo")
        generation = session.generate([1], max_new_tokens=2900)
        await generation.__anext__()
        await client.close()
        with pytest.raises(shmsched.ClientClosed):
            await collect(generation)
        assert generation.finish_reason is FinishReason.FAILED

    run(main())


@way_of
def test_who_leaves_a_loop_goes_on_with_the_session_at_once(
    cluster: shmsched.Cluster, run: Run, way: dict[str, Any]
) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session(model="echo") as session:
            generation = session.generate([1, 2, 3], max_new_tokens=100, **way)
            async for _ in generation:
                if len(generation.tokens) == 3:
                    break
            assert generation.finish_reason is FinishReason.CANCELLED
            given = generation.tokens
            assert await collect(session.generate([], max_new_tokens=2, **way)) == echoes([1, 2, 3, *given], 2)
            async for _ in session.generate([7], max_new_tokens=100, **way):
                break
            answered = await session.submit([5])
            assert answered.tokens.tolist() == echoes(session.history.tolist(), 1)

    run(main())


@way_of
def test_a_generation_that_begins_where_its_session_has_moved_is_refused(
    cluster: shmsched.Cluster, run: Run, way: dict[str, Any]
) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session(model="echo") as session:
            first = session.generate([1, 2, 3], max_new_tokens=4, **way)
            second = session.generate([9], max_new_tokens=4, **way)
            given = await collect(first)
            with pytest.raises(shmsched.InvalidRequest, match=r"goes on at 6, and at 0 then. Call generate again"):
                await collect(second)
            assert await collect(session.generate([9], max_new_tokens=2)) == echoes([1, 2, 3, *given, 9], 2)

    run(main())


@pytest.mark.parametrize("continuation", [True, False])
@pytest.mark.parametrize("cancellings", [1, 2])
def test_a_cancelled_task_keeps_what_an_engine_that_cannot_rewind_has_run(
    run: Run, continuation: bool, cancellings: int
) -> None:
    async def main(socket: Path) -> None:
        async with shmsched.AsyncClient(socket=socket) as client, client.open_session() as session:
            generation = session.generate([1, 2, 3], max_new_tokens=100, continuation=continuation)
            task = asyncio.create_task(collect(generation))
            await until(lambda: len(generation.tokens) >= 3, "three tokens")
            for _ in range(cancellings):
                task.cancel()
                await asyncio.sleep(0.002)
            with pytest.raises(asyncio.CancelledError):
                await task
            sampled = generation.tokens
            assert sampled == echoes([1, 2, 3], len(sampled))
            assert session.unfed == sampled[-1]
            assert await collect(session.generate([], max_new_tokens=2)) == echoes([1, 2, 3, *sampled], 2)

    with shmsched.launch(f"{ENGINES}:Rigid?vocab={VOCAB}&step_us=30000") as cluster:
        run(main(cluster.socket))


@pytest.mark.parametrize(("engine", "continuation"), [("echo", True), ("echo", False), (f"{ENGINES}:Rigid", True)])
def test_one_that_still_waits_for_room_leaves_the_line_with_its_task(run: Run, engine: str, continuation: bool) -> None:
    async def main(socket: Path) -> None:
        async with shmsched.AsyncClient(socket=socket) as client, client.open_session() as session:
            fillers = [await client.open_session() for _ in range(20)]
            # More than the token ring holds.
            prompts = [filler.submit([1] * 19_000) for filler in fillers]
            generation = session.generate([1, 2, 3], max_new_tokens=1000, continuation=continuation)
            task = asyncio.create_task(collect(generation))
            await asyncio.sleep(0)
            assert (session.position, generation.finish_reason) == (0, None)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (session.position, generation.tokens) == (0, [])
            assert not all(prompt.done() for prompt in prompts), "nobody else has run by then"
            step = session.submit([4])
            for prompt in prompts:
                assert (await prompt).tokens.tolist() == echoes([1] * 19_000, 1)
            assert (await step).tokens.tolist() == echoes([4], 1)
            for filler in fillers:
                await filler.close()

    with shmsched.launch(f"{engine}?vocab={VOCAB}&step_us=5000", max_prefill_chunk_size=8192) as cluster:
        run(main(cluster.socket))

"""Engines of one model that can take different amounts, and do different things: a session has what its own engine can."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import shmsched
from shmsched.wire.frames import Rewinds

from processes.expected import echoes
from processes.loops import runner_of
from processes.ways import DEADLINE, ENGINES

LARGE = f"{ENGINES}:Sized?tokens=2000&chunk=64"
SMALL = f"{ENGINES}:Sized?tokens=100&chunk=8"
LESSER = f"{ENGINES}:SizedAndRigid?tokens=500&chunk=32"


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(LARGE, SMALL, LESSER) as cluster:
        yield cluster


def one_of_each(client: shmsched.Client) -> dict[int, shmsched.Session]:
    """Three sessions, one in each engine: the least loaded gets the next. By how much they hold."""
    sessions = [client.open_session(timeout=DEADLINE) for _ in range(3)]
    by_size = {session.model.max_session_tokens: session for session in sessions}
    assert sorted(by_size) == [100, 500, 2000]
    return by_size


def test_clients_are_told_what_any_session_can_rely_on(cluster: shmsched.Cluster) -> None:
    with cluster.client() as client:
        model = client.models["sized"]
        assert (model.engines, model.max_sessions) == (3, 12)
        assert (model.max_session_tokens, model.max_prefill_chunk_size) == (100, 8)
        assert (model.rewinds, model.supports_rewind, model.supports_fork) == (Rewinds.NOWHERE, False, False)


def test_a_session_has_the_limits_of_its_own_engine(cluster: shmsched.Cluster) -> None:
    with cluster.client() as client:
        for size, session in one_of_each(client).items():
            chunk = {100: 8, 500: 32, 2000: 64}[size]
            assert session.model.max_prefill_chunk_size == chunk
            prompt = [i % 90 for i in range(size)]
            raw = session.submit(prompt[:chunk], sampling=None, output_rows=shmsched.OutputRows.ALL).result(DEADLINE)
            assert raw.logits is not None
            assert [int(np.argmax(row)) for row in raw.logits.data] == [
                echoes(prompt[:n], 1)[0] for n in range(1, chunk + 1)
            ]
            with pytest.raises(shmsched.InvalidRequest, match=f"must fit one chunk of {chunk}"):
                session.submit([1] * (chunk + 1), output_rows=shmsched.OutputRows.ALL)
            rest = session.submit(prompt[chunk : size - 4]).result(DEADLINE)
            assert rest.tokens.tolist() == echoes(prompt[: size - 4], 1)
            generation = session.generate([7], max_new_tokens=100)
            assert list(generation) == echoes([*prompt[: size - 4], 7], 4)
            assert session.position == size
            with pytest.raises(shmsched.InvalidRequest, match=f"takes at most {size}"):
                session.submit([1])


def test_a_session_has_the_abilities_of_its_own_engine(cluster: shmsched.Cluster) -> None:
    with cluster.client() as client:
        sessions = one_of_each(client)
        for size, session in sessions.items():
            session.submit([1, 2, 3]).result(DEADLINE)
            if size == 500:
                with pytest.raises(shmsched.Unsupported, match="cannot rewind"):
                    session.submit([4], position=1)
                assert not session.model.supports_fork
                continue
            assert session.submit([4], position=1).result(DEADLINE).tokens.tolist() == echoes([1, 4], 1)
            with session.fork() as fork:
                assert fork.engine == session.engine
                assert fork.submit([5]).result(DEADLINE).tokens.tolist() == echoes([1, 4, 5], 1)


def test_what_fits_one_and_not_another_is_refused_in_words_where_it_ends_up(cluster: shmsched.Cluster) -> None:
    with cluster.client() as client:
        sessions = one_of_each(client)
        for size, session in sessions.items():
            with pytest.raises(
                shmsched.InvalidRequest, match=f"would hold {size + 1} tokens; sized takes at most {size}"
            ):
                session.submit([1] * (size + 1))
            assert session.submit([1]).result(DEADLINE).tokens.tolist() == echoes([1], 1)


def test_the_same_for_tasks(cluster: shmsched.Cluster) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client:
            sessions = [await client.open_session() for _ in range(3)]
            for session in sessions:
                size = session.model.max_session_tokens
                prompt = [i % 90 for i in range(size - 2)]
                assert [token async for token in session.generate(prompt, max_new_tokens=9)] == echoes(prompt, 3)
            assert sorted(session.model.max_session_tokens for session in sessions) == [100, 500, 2000]

    runner_of("asyncio")(main())

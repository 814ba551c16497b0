"""What lives in one process is neither pickled nor copied, and half-made objects make no noise."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import numpy as np
import pytest

import shmsched
from shmsched.client.async_replies import AsyncReply, AsyncStream
from shmsched.client.async_session import OpeningSession
from shmsched.client.futures import WaitingStream
from shmsched.client.leases import Lease
from shmsched.client.receiver import Receiver

VOCAB = 500
DEADLINE = 30.0


def by_reduction(what: Any) -> None:
    """As cloudpickle and joblib do it."""
    what.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


WAYS: list[Callable[[Any], Any]] = [
    *(lambda what, p=p: pickle.dumps(what, p) for p in range(pickle.HIGHEST_PROTOCOL + 1)),
    copy.copy,
    copy.deepcopy,
    by_reduction,
    lambda what: pickle.dumps({"deep": [what]}),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(f"echo?vocab={VOCAB}&max_sessions=8") as cluster:
        yield cluster


def refused(what: Any, instead: str) -> None:
    for way in WAYS:
        with pytest.raises(TypeError, match=instead):
            way(what)


def test_what_a_client_gives(cluster: shmsched.Cluster) -> None:
    with cluster.client() as client, client.open_session() as session, client.open_session() as other:
        response = session.submit([1], sampling=None).result(DEADLINE)
        with other.generate([1], max_new_tokens=5) as generation, shmsched.Control(cluster.socket) as control:
            stream = session.stream([1], further=1)
            for what in (client, session, cluster, control, generation, stream):
                refused(what, "make a Client there")
            stream.wait_until_ended(DEADLINE)
        refused(session.submit([1]), "make a Client there")
        refused(response.logits, r"\.copy\(\)")
        for way in (copy.deepcopy, *WAYS[:6]):
            with pytest.raises(TypeError, match=r"\.copy\(\)"):
                way(response)
        refused(shmsched.EngineDraft(other), "make a Client there")
        sampled = session.submit([1]).result(DEADLINE)
        assert pickle.loads(pickle.dumps(sampled)).tokens.tolist() == sampled.tokens.tolist()
        assert copy.deepcopy(sampled).tokens.tolist() == sampled.tokens.tolist()


def test_rows_of_logits_are_pickled_and_copied_as_any_array(cluster: shmsched.Cluster) -> None:
    with cluster.client() as client, client.open_session() as session:
        logits = session.submit([1], sampling=None).result(DEADLINE).logits
        assert logits is not None
        was = logits.copy()
        others = [pickle.loads(pickle.dumps(logits.data)), copy.copy(logits.data), copy.deepcopy(logits.data[:, 3:])]
        logits.release()
        session.submit([2], sampling=None).result(DEADLINE)
        for other, part in zip(others, (was, was, was[:, 3:]), strict=True):
            assert np.array_equal(other, part)


def test_what_an_async_client_gives(cluster: shmsched.Cluster) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE),
            shmsched.AsyncClient(socket=cluster.socket) as client,
            client.open_session() as session,
        ):
            step = session.submit([1])
            generation = session.generate([1], max_new_tokens=2)
            opening = client.open_session()
            for what in (client, session, step, generation, opening):
                refused(what, "make a Client there")
            await step
            stream = await session.stream([1], further=1)
            refused(stream, "make a Client there")
            await stream.wait_until_ended()
            async with opening:
                pass

    asyncio.run(main())


def test_the_scheduler_in_process() -> None:
    scheduler = shmsched.Scheduler()
    refused(scheduler, "share this one")
    refused(scheduler.submit(shmsched.Request(1, 1, [1])), "pass its result on")
    refused(shmsched.LogitsBlock(np.zeros((1, 3), np.float32)), r"\.copy\(\)")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_arguments_of_processes(cluster: shmsched.Cluster, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    with cluster.client() as client, client.open_session() as session:
        for what in (client, session):
            process = context.Process(target=print, args=(what,))
            with pytest.raises(TypeError, match="make a Client there"):
                process.start()
        assert session.submit([1]).result(DEADLINE)


def test_what_is_plain_goes_through() -> None:
    plain = [
        shmsched.SamplingParams(1.0, seed=3),
        shmsched.RequestParams(3),
        shmsched.SchedulerParams(3, 4),
        shmsched.EngineInfo(model="m", vocab_size=3, max_sessions=1, max_session_tokens=3),
    ]
    for what in plain:
        assert pickle.loads(pickle.dumps(what)) == copy.deepcopy(what) == what
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        request = pickle.loads(pickle.dumps(shmsched.Request(1, 2, [3]), protocol))
        assert (request.request_id, request.session_id, request.tokens) == (1, 2, [3])


def test_half_made_objects_make_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    noise: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", noise.append)
    public = [v for v in map(vars(shmsched).get, shmsched.__all__) if inspect.isclass(v) and not issubclass(v, Enum)]
    public += [getattr(shmsched, name) for name in ("Client", "AsyncClient", "Session", "AsyncSession", "Generation")]
    public += [shmsched.AsyncGeneration, shmsched.Cluster, shmsched.Control, shmsched.LogitsBlock, shmsched.Scheduler]
    for kind in {*public, AsyncStream, OpeningSession, AsyncReply, WaitingStream, Lease, Receiver}:
        kind.__new__(kind)
    with pytest.raises(shmsched.ShmschedError):
        shmsched.Client(socket="/nowhere/at/all")
    gc.collect()
    assert noise == []

"""Generations whose engine is lost on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import shmsched
from shmsched.client.generation import FinishReason

from processes.expected import VOCAB, echoes
from processes.ways import way_of


def kill_its_engine(cluster: shmsched.Cluster, session: shmsched.Session) -> None:
    (pid,) = (e["pid"] for e in cluster.status()["engines"] if e["engine"] == session.engine)
    os.kill(pid, signal.SIGKILL)


@pytest.fixture(params=[1, 2], ids=["restarted", "another"])
def slow(request: pytest.FixtureRequest) -> Iterator[shmsched.Cluster]:
    with shmsched.launch(
        f"echo?vocab={VOCAB}&step_us=1000", engines=request.param, max_prefill_chunk_size=16
    ) as cluster:
        yield cluster


@way_of
def test_killing_engines_costs_a_pause_and_no_token(slow: shmsched.Cluster, way: dict[str, Any]) -> None:
    with slow.client() as client, client.open_session() as session:
        before = list(session.generate([4, 5, 6], max_new_tokens=20))
        generation = session.generate([1, 2, 3], max_new_tokens=60, on_session_lost="replay", **way)
        tokens = []
        for n, token in enumerate(generation):
            tokens.append(token)
            if n in (10, 30):
                kill_its_engine(slow, session)
        fed = [4, 5, 6, *before, 1, 2, 3]
        assert tokens == echoes(fed, 60)
        assert session.history.tolist() == fed + tokens[:-1]
        assert list(session.generate([], max_new_tokens=5)) == echoes(fed, 65)[60:]


def test_otherwise_the_caller_is_told(slow: shmsched.Cluster) -> None:
    with slow.client() as client, client.open_session() as session:
        generation = session.generate([1, 2, 3], max_new_tokens=10_000)
        first = next(generation)
        kill_its_engine(slow, session)
        with pytest.raises((shmsched.EngineDied, shmsched.SessionLost)):
            list(generation)
        assert generation.finish_reason is FinishReason.FAILED
        assert generation.tokens[0] == first
        with pytest.raises((shmsched.EngineDied, shmsched.SessionLost)):
            session.generate([1], max_new_tokens=1)

"""What the tests of generations share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shmsched

from processes.expected import VOCAB


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    spec = f"echo?vocab={VOCAB}&max_session_tokens=3000"
    with shmsched.launch(spec, f"{spec}&model=small&step_us=0", max_prefill_chunk_size=16) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: shmsched.Cluster) -> Iterator[shmsched.Client]:
    with cluster.client() as client:
        yield client


@pytest.fixture
def session(client: shmsched.Client) -> Iterator[shmsched.Session]:
    with client.open_session(model="echo", seed=5) as session:
        yield session

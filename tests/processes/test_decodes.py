"""A session's next token, wanted as the last one was, takes a shorter way: what is refused, or meant otherwise, is so there too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shmsched

from processes.expected import VOCAB, echoes

MOST = 20
DEADLINE = 30.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(f"echo?vocab={VOCAB}&max_sessions=4&max_session_tokens={MOST}") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: shmsched.Cluster) -> Iterator[shmsched.Client]:
    with cluster.client() as client:
        yield client


@pytest.fixture
def session(client: shmsched.Client) -> Iterator[shmsched.Session]:
    """It has had one decode, token 1."""
    with client.open_session() as session:
        assert decoded(session, 1) == expected([1])
        yield session


def decoded(session: shmsched.Session, token: int, **wanted: Any) -> int:
    return int(session.submit([token], **wanted).result(DEADLINE).tokens[0])


def expected(tokens: list[int]) -> int:
    return echoes(tokens, 1)[0]


@pytest.mark.parametrize("token", [VOCAB, -1, 1.5, True, "a", 10**30, None])
def test_what_is_no_token_is_refused(session: shmsched.Session, token: Any) -> None:
    with pytest.raises(shmsched.InvalidRequest, match="token"):
        session.submit([token])
    assert session.position == 1
    assert decoded(session, 2) == expected([1, 2])


@pytest.mark.parametrize("position", [2, -1, 1.0, "1"])
def test_a_position_where_the_session_is_not_is_refused(session: shmsched.Session, position: Any) -> None:
    with pytest.raises(shmsched.InvalidRequest, match="position"):
        session.submit([2], position=position)
    assert session.position == 1


def test_a_position_below_rewinds(session: shmsched.Session) -> None:
    assert decoded(session, 2, position=1) == expected([1, 2])
    assert decoded(session, 3, position=0) == expected([3])
    assert decoded(session, 4) == expected([3, 4])
    assert session.history.tolist() == [3, 4]


def test_logits_are_those_of_their_own_step(client: shmsched.Client) -> None:
    with client.open_session() as one, client.open_session() as other:
        for i in range(1, 6):
            futures = [
                (list(range(k, k + i)), s.submit([k + i - 1], sampling=None)) for k, s in ((1, one), (101, other))
            ]
            for held, future in futures:
                logits = future.result(DEADLINE).logits
                assert logits is not None
                assert int(np.argmax(logits.data)) == expected(held)


def test_what_is_wanted_changes_from_step_to_step(session: shmsched.Session) -> None:
    raw = session.submit([2], sampling=None).result(DEADLINE)
    assert raw.logits is not None
    assert int(np.argmax(raw.logits.data)) == expected([1, 2])
    assert session.submit([3], output_rows=shmsched.OutputRows.NONE).result(DEADLINE).tokens.size == 0
    assert decoded(session, 4) == expected([1, 2, 3, 4])


def test_a_full_session_takes_no_more(session: shmsched.Session) -> None:
    for token in range(2, MOST + 1):
        decoded(session, token)
    with pytest.raises(shmsched.InvalidRequest, match=str(MOST)):
        session.submit([1])
    assert session.history.tolist() == list(range(1, MOST + 1))


def test_a_session_that_generates_takes_nothing_else(session: shmsched.Session) -> None:
    wanted = shmsched.SamplingParams(seed=1)
    generation = session.generate([2], max_new_tokens=5, sampling=wanted, continuation=False)
    next(generation)
    with pytest.raises(shmsched.InvalidRequest, match="generating"):
        session.submit([3], sampling=wanted)
    generation.close()
    held = session.history.tolist()
    assert decoded(session, 3, sampling=wanted) == expected([*held, 3])


def test_a_session_that_streams_takes_nothing_else() -> None:
    with (
        shmsched.launch(f"echo?vocab={VOCAB}&max_session_tokens=1000000&step_us=1000") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        decoded(session, 1)
        stream = session.stream([2], further=900_000)
        with pytest.raises(shmsched.InvalidRequest, match="generating"):
            session.submit([3])
        assert stream.cancel()
        held = session.history.tolist()
        assert decoded(session, 3) == expected([*held, 3])


def test_what_a_generation_wanted_is_not_wanted_of_the_next_step(session: shmsched.Session) -> None:
    """One of a single token, with stop tokens: nothing goes on behind it."""
    wanted = shmsched.SamplingParams(seed=1)
    generation = session.generate([2], max_new_tokens=1, sampling=wanted, stop_tokens=[5])
    assert list(generation) == [expected([1, 2])]
    assert decoded(session, 3, sampling=wanted) == expected([1, 2, 3])


def test_a_deadline_is_its_own_step_s(session: shmsched.Session) -> None:
    deadline = time.monotonic() + DEADLINE
    assert decoded(session, 2, deadline=deadline) == expected([1, 2])
    near = time.monotonic() + 0.01
    try:
        decoded(session, 3, deadline=near)
    except shmsched.DeadlineExceeded:
        decoded(session, 3)
    while time.monotonic() < near:
        pass
    assert decoded(session, 4) == expected([1, 2, 3, 4])


def test_ids_that_were_given_by_hand_are_not_given_again(client: shmsched.Client, session: shmsched.Session) -> None:
    """As long as they are outstanding: here until the client reads, which nobody does in between."""
    with client.open_session() as other:
        decoded(other, 1)
        last = session.submit([2]).result(DEADLINE).request_id
        params = shmsched.RequestParams(position=1)
        asked = [
            client.submit(shmsched.Request(last + 1, other.session_id, [2], params)),
            session.submit([3]),
        ]
        ids = [future.result(DEADLINE).request_id for future in asked]
    assert ids[0] == last + 1
    assert len(set(ids)) == 2

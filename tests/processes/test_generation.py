"""The closed loop over a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shmsched
from shmsched.client.generation import generate_tokens
from shmsched.workers.echo import advance, answer

VOCAB = 1000


@pytest.fixture(scope="module")
def client() -> Iterator[shmsched.Client]:
    with shmsched.launch(f"echo?vocab={VOCAB}&max_session_tokens=20") as cluster, cluster.client() as client:
        yield client


def expected(prompt: list[int], n: int) -> list[int]:
    h = advance(0, prompt)
    tokens = []
    for _ in range(n):
        tokens.append(answer(h, VOCAB))
        h = advance(h, tokens[-1:])
    return tokens


def test_each_token_is_the_next_step(client: shmsched.Client) -> None:
    with client.open_session() as session:
        assert list(generate_tokens(session, [1, 2, 3], max_new_tokens=10)) == expected([1, 2, 3], 10)
        assert session.position == 12, "the last token is not submitted"


def test_it_ends_before_a_stop_token(client: shmsched.Client) -> None:
    tokens = expected([5], 6)
    assert len(set(tokens)) == 6
    with client.open_session() as session:
        assert list(generate_tokens(session, [5], max_new_tokens=10, stop_tokens=(tokens[4],))) == tokens[:4]


def test_it_ends_when_the_session_is_full(client: shmsched.Client) -> None:
    with client.open_session() as session:
        assert len(list(generate_tokens(session, [1, 2, 3], max_new_tokens=100))) == 18
        assert session.position == 20
    with client.open_session() as session, pytest.raises(shmsched.InvalidRequest, match="21"):
        list(generate_tokens(session, range(21), max_new_tokens=1))


def test_a_caller_who_leaves_early_can_go_on_with_the_session(client: shmsched.Client) -> None:
    with client.open_session() as session:
        tokens = generate_tokens(session, [1, 2, 3], max_new_tokens=10)
        first = [next(tokens), next(tokens)]
        tokens.close()
        # The step for the second token may have run before it could be cancelled.
        taken = [1, 2, 3, *first][: session.position]
        rest = [7] if session.position == 5 else [first[1], 7]
        assert session.submit(rest).result(30).tokens.tolist() == [answer(advance(0, [*taken, *rest]), VOCAB)]

"""``session.fork``: an independent session that begins with what another one holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import shmsched
from shmsched.workers.echo import advance, answer

VOCAB = 1000
DEADLINE = 30.0
UNFORKABLE = f"{Path(__file__).with_name('engines.py')}:Unforkable?vocab={VOCAB}"


@pytest.fixture(scope="module", params=["in the engine", "by prefilling again"])
def cluster(request: pytest.FixtureRequest) -> Iterator[shmsched.Cluster]:
    spec = f"echo?vocab={VOCAB}&max_sessions=8" if request.param == "in the engine" else f"{UNFORKABLE}&max_sessions=8"
    with shmsched.launch(spec, max_prefill_chunk_size=16) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: shmsched.Cluster) -> Iterator[shmsched.Client]:
    with cluster.client() as client:
        yield client


def echo(fed: list[int]) -> list[int]:
    return [answer(advance(0, fed), VOCAB)]


@pytest.mark.parametrize("upto", [None, 0, 1, 7, 39, 40])
def test_both_go_their_own_way_from_there(client: shmsched.Client, upto: int | None) -> None:
    prompt = list(range(40))
    with client.open_session(options=b"kept") as parent:
        parent.submit(prompt)
        with parent.fork(upto) as child:
            held = prompt[:upto]
            assert (child.position, child.history.tolist(), child.options) == (len(held), held, b"kept")
            assert parent.submit([7]).result(DEADLINE).tokens.tolist() == echo([*prompt, 7])
            assert child.submit([8, 9]).result(DEADLINE).tokens.tolist() == echo([*held, 8, 9])
            assert parent.submit([1], position=5).result(DEADLINE).tokens.tolist() == echo([*prompt[:5], 1])
            assert child.submit([4]).result(DEADLINE).tokens.tolist() == echo([*held, 8, 9, 4])
            parent.close()
            grandchild = child.fork()
            assert grandchild.submit([5]).result(DEADLINE).tokens.tolist() == echo([*held, 8, 9, 4, 5])


def test_a_shared_prompt_is_run_once(cluster: shmsched.Cluster, client: shmsched.Client) -> None:
    """Where the engine can fork."""
    with client.open_session() as parent:
        parent.submit(list(range(100))).result(DEADLINE)
        before = sum(engine["tokens"] for engine in cluster.status()["engines"])
        children = [parent.fork() for _ in range(5)]
        after = sum(engine["tokens"] for engine in cluster.status()["engines"])
        assert after - before == (0 if parent.model.supports_fork else 500)
        for child in children:
            child.close()


def test_what_cannot_be_forked_is_refused(client: shmsched.Client) -> None:
    with client.open_session() as session:
        session.submit([1, 2, 3]).result(DEADLINE)
        for wrong in (4, -1, "2"):
            with pytest.raises(shmsched.InvalidRequest, match="from 0 to 3 .what session"):
                session.fork(wrong)  # type: ignore[arg-type]
    with pytest.raises(shmsched.SessionClosed):
        session.fork()


@pytest.mark.parametrize("continuation", [True, False])
def test_a_session_that_generates_cannot_be_forked_and_after_it_the_fork_goes_on_with_its_last_token(
    client: shmsched.Client, continuation: bool
) -> None:
    with client.open_session() as session:
        generation = session.generate([1, 2], max_new_tokens=500, continuation=continuation)
        tokens = [next(generation) for _ in range(3)]
        with pytest.raises(shmsched.InvalidRequest, match="is generating; close that generation"):
            session.fork()
        generation.close()
        with session.fork() as fork, session.fork(2) as shorter:
            assert (fork.unfed, fork.position) == (tokens[-1], 4)
            assert shorter.unfed is None
            more = list(fork.generate([], max_new_tokens=4))
            assert more == list(session.generate([], max_new_tokens=4))
            assert more[:1] == echo([1, 2, *tokens])
            assert shorter.submit([7]).result(DEADLINE).tokens.tolist() == echo([1, 2, 7])


def test_without_a_slot_it_waits_or_says_full(client: shmsched.Client) -> None:
    with client.open_session() as session:
        session.submit([1, 2, 3]).result(DEADLINE)
        others = [client.open_session() for _ in range(7)]
        with pytest.raises(shmsched.Full):
            session.fork(block=False)
        with pytest.raises(shmsched.Full):
            session.fork(timeout=0.05)
        others[3].close()
        with session.fork(timeout=DEADLINE) as child:
            assert child.submit([4]).result(DEADLINE).tokens.tolist() == echo([1, 2, 3, 4])
        for other in others:
            other.close()


def test_where_its_own_engine_is_full_another_one_prefills_it() -> None:
    with (
        shmsched.launch(f"echo?vocab={VOCAB}&max_sessions=1", engines=2) as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        session.submit([1, 2, 3]).result(DEADLINE)
        with session.fork() as child:
            assert child.engine != session.engine
            assert child.submit([4]).result(DEADLINE).tokens.tolist() == echo([1, 2, 3, 4])


def test_seeds_differ_unless_one_is_given(client: shmsched.Client) -> None:
    with client.open_session(seed=5) as session, session.fork() as drawn, session.fork(seed=6) as given:
        assert (session.seed, given.seed) == (5, 6)
        assert drawn.seed not in (5, 6)


def test_a_lost_session_can_be_opened_again_in_its_place(cluster: shmsched.Cluster, client: shmsched.Client) -> None:
    with client.open_session(seed=3, options=b"x") as session:
        session.submit([1, 2, 3]).result(DEADLINE)
        before = session.session_id
        session.close()
        session.reopen(DEADLINE)
        assert (session.position, session.seed, session.options) == (0, 3, b"x")
        assert session.session_id != before
        assert session.submit([4]).result(DEADLINE).tokens.tolist() == echo([4])

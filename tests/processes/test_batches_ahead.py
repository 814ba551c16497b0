"""An engine with nothing but generations to run is given the next batch while it runs one, and makes no pause."""

from __future__ import annotations

import time
from typing import Any

import pytest

import shmsched

from processes.expected import VOCAB, echoes
from processes.leftovers import wait_until
from processes.reading import drain
from processes.ways import ENGINES

DEADLINE = 30.0
STEP_S = 0.02
"""Long enough for the scheduler to look ahead in the middle of a batch, on a machine with other things to do too."""
SLOW = f"shmsched.tools.bench.engines:Numbered?vocab={VOCAB}&step_us={1e6 * STEP_S:g}"
pytestmark = pytest.mark.usefixtures("no_leftovers")


def engine(cluster: shmsched.Cluster) -> dict[str, Any]:
    status: dict[str, Any] = cluster.status()["engines"][0]
    return status


def test_generations_run_ahead_and_all_of_it_is_right() -> None:
    with shmsched.launch(SLOW) as cluster, cluster.client() as client:
        sessions = [client.open_session() for _ in range(3)]
        streams = [session.stream([i, 1], further=10 + i) for i, session in enumerate(sessions)]
        assert [drain(stream) for stream in streams] == [echoes([i, 1], 11 + i) for i in range(3)]
        assert engine(cluster)["batches_ahead"] >= 5
        status = cluster.status()
        assert status["ledger"]["completed"] == status["ledger"]["submitted"] == 11 + 12 + 13
        assert status["engines"][0]["stale_answers"] == 0


def test_a_session_goes_on_right_behind_a_stop_token_that_nobody_foresaw() -> None:
    """The engine has taken the token by then, and gives it back."""
    expected = echoes([5, 6], 30)
    stop = next(t for i, t in enumerate(expected) if i >= 6 and t not in expected[:i])
    got = expected[: expected.index(stop) + 1]
    with shmsched.launch(SLOW) as cluster, cluster.client() as client, client.open_session() as session:
        assert drain(session.stream([5, 6], further=1000, stop_tokens=(stop,))) == got
        assert engine(cluster)["batches_ahead"] >= 3
        again = session.submit([9]).result(DEADLINE)
        assert again.tokens.tolist() == echoes([5, 6, *got[:-1], 9], 1)


def test_whoever_comes_meanwhile_waits_for_one_batch_more_at_most() -> None:
    with shmsched.launch(SLOW) as cluster, cluster.client() as client:
        stream = client.open_session().stream([1], further=60)
        other = client.open_session()
        stream.next(DEADLINE)
        for i in range(5):
            running = engine(cluster)["in_flight"]
            response = other.submit([i]).result(DEADLINE)
            assert response.logprobs is not None
            # The one that runs may have ended before the step came in.
            assert running is None or response.logprobs[0] <= running["batch"] + 3
            # A session that is not expected back is not waited for.
            time.sleep(2 * STEP_S)
        assert not stream.done()
        stream.cancel()


@pytest.mark.parametrize("name", ["Forgetful", "Stateful"])
def test_an_engine_that_cannot_give_tokens_back_is_not_sent_ahead(name: str) -> None:
    with shmsched.launch(f"{ENGINES}:{name}") as cluster, cluster.client() as client:
        stream = client.open_session().stream([1], further=20)
        assert len(drain(stream)) == 21
        assert engine(cluster)["batches_ahead"] == 0


def test_a_session_goes_on_behind_a_stop_token_where_its_engine_can_only_begin_again() -> None:
    expected = echoes([5, 6], 30)
    stop = next(t for i, t in enumerate(expected) if i >= 6 and t not in expected[:i])
    got = expected[: expected.index(stop) + 1]
    with (
        shmsched.launch(f"{ENGINES}:Stateful") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        assert drain(session.stream([5, 6], further=1000, stop_tokens=(stop,))) == got
        assert drain(session.stream([9], further=5)) == echoes([5, 6, *got[:-1], 9], 6)
        assert session.submit([1], position=0).result(DEADLINE).tokens.tolist() == echoes([1], 1)


def test_a_closed_generation_holds_nothing_up() -> None:
    with shmsched.launch(SLOW) as cluster, cluster.client() as client:
        session = client.open_session()
        session.stream([1], further=1000).next(DEADLINE)
        session.close()
        wait_until(lambda: engine(cluster)["in_flight"] is None, "the engine to end what it was given ahead")
        with client.open_session() as after:
            assert after.submit([3]).result(DEADLINE).tokens.tolist() == echoes([3], 1)
        assert cluster.status()["ledger"]["in_flight"] == 0

"""Generations that the scheduler drives: every token, where the session stands afterwards, and what ends them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmsched

from processes.engines import FAIL
from processes.expected import VOCAB, echoes, prompt_that_meets
from processes.leftovers import wait_until
from processes.reading import drain

DEADLINE = 30.0
MOODY = f"{Path(__file__).with_name('engines.py')}:Moody?vocab={VOCAB}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(
        f"echo?vocab={VOCAB}&max_sessions=64&max_session_tokens=20000", max_prefill_chunk_size=16
    ) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: shmsched.Cluster) -> Iterator[shmsched.Client]:
    with cluster.client() as client:
        yield client


@pytest.mark.parametrize("n_prompt", [1, 2, 16, 17, 100])
@pytest.mark.parametrize("further", [0, 1, 40])
def test_it_gives_what_client_driven_steps_give(client: shmsched.Client, n_prompt: int, further: int) -> None:
    prompt = list(range(n_prompt))
    with client.open_session() as session:
        assert drain(session.stream(prompt, further=further)) == echoes(prompt, further + 1)
        # The last token is sampled, and not fed.
        assert session.position == n_prompt + further
        assert session.history.tolist() == prompt + echoes(prompt, further)
        stream = session.stream([1], further=0)
        stream.next(DEADLINE)
        with pytest.raises(EOFError):
            stream.next(DEADLINE)


def test_a_stop_token_ends_it_and_is_its_last(client: shmsched.Client) -> None:
    expected = echoes([5, 6], 30)
    stop = expected[12]
    with client.open_session() as session:
        stops = (*(t for t in range(VOCAB) if t not in expected), stop)[-16:]
        assert drain(session.stream([5, 6], further=1000, stop_tokens=stops)) == expected[: expected.index(stop) + 1]
        assert session.position == 2 + expected.index(stop)


def test_many_at_once_are_all_right_and_each_step_is_counted(cluster: shmsched.Cluster) -> None:
    before = cluster.status()["ledger"]
    with cluster.client() as client:
        sessions = [client.open_session() for _ in range(48)]
        streams = [session.stream([i, 7, 8], further=150) for i, session in enumerate(sessions)]
        for i, stream in enumerate(streams):
            assert drain(stream) == echoes([i, 7, 8], 151)
        after = cluster.status()["ledger"]
    assert after["completed"] - before["completed"] == 48 * 151
    assert after["submitted"] - before["submitted"] == 48 * 151
    assert after["queued"] == after["in_flight"] == 0


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_cancelling_leaves_the_session_behind_the_last_token_that_was_taken(
    client: shmsched.Client, taken: int
) -> None:
    with client.open_session() as session:
        stream = session.stream([1, 2, 3], further=10_000)
        got = [stream.next(DEADLINE).token for _ in range(taken)]
        stream.cancel()
        assert stream.done()
        assert session.position == (3 + taken - 1 if taken else 0)
        prompt = [1, 2, 3] if taken else []
        assert session.history.tolist() == prompt + got[:-1]
        rest = got[-1:] or [9]
        again = session.submit(rest).result(DEADLINE)
        assert again.tokens.tolist() == echoes([*prompt, *got[:-1], *rest], 1)


def test_halting_ends_it_with_the_step_that_runs(client: shmsched.Client) -> None:
    with client.open_session() as session:
        stream = session.stream([1, 2], further=15_000)
        first = stream.next(DEADLINE).token
        stream.halt()
        tokens = [first, *drain(stream)]
        assert tokens == echoes([1, 2], len(tokens))
        assert len(tokens) < 15_000
        assert session.position == 2 + len(tokens) - 1
        assert session.submit(tokens[-1:]).result(DEADLINE).tokens.tolist() == echoes([1, 2], len(tokens) + 1)[-1:]


def test_nothing_can_be_submitted_to_a_session_that_generates(client: shmsched.Client) -> None:
    with client.open_session() as session:
        stream = session.stream([1, 2], further=10_000)
        with pytest.raises(shmsched.InvalidRequest, match="is generating"):
            session.submit([1])
        with pytest.raises(shmsched.InvalidRequest, match="is generating"):
            session.fork()
        stream.cancel()
        session.submit([1]).result(DEADLINE)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"further": -1}, "further is -1"),
        ({"further": 20_000}, "20002 tokens"),
        ({"further": 1, "stop_tokens": (VOCAB,)}, f"stop_tokens: token {VOCAB}"),
        ({"further": 1, "stop_tokens": tuple(range(17))}, "at most 16"),
        ({"further": 1, "sampling": None}, "sampling is None"),
    ],
)
def test_what_can_never_run_is_refused_at_the_call(client: shmsched.Client, wrong: dict, named: str) -> None:
    with client.open_session() as session:
        with pytest.raises(shmsched.InvalidRequest, match=named):
            session.stream([1, 2], **wrong)
        assert drain(session.stream([1, 2], further=3)) == echoes([1, 2], 4)


def test_one_that_is_not_read_stalls_alone_and_goes_on_where_it_stood(cluster: shmsched.Cluster) -> None:
    """More tokens than the stream's ring holds: those that nobody takes yet wait in the client, which reads them all."""
    with cluster.client() as client:
        sessions = [client.open_session() for _ in range(8)]
        streams = [session.stream([i], further=6000) for i, session in enumerate(sessions)]
        for i, stream in enumerate(streams):
            assert stream.wait_until_ended(120), "a generation to end"
            assert drain(stream) == echoes([i], 6001)


def test_a_deadline_ends_a_generation_in_the_middle(client: shmsched.Client) -> None:
    with client.open_session() as session:
        stream = session.stream([1, 2], further=15_000, deadline=time.monotonic() + 0.2)
        tokens = []
        with pytest.raises(shmsched.DeadlineExceeded, match="was not dispatched by its deadline"):
            while True:
                tokens.append(stream.next(DEADLINE).token)
        assert tokens == echoes([1, 2], len(tokens))
        # The step that missed it would have fed the last token.
        assert session.position == 2 + len(tokens) - 1
        assert session.submit(tokens[-1:]).result(DEADLINE).tokens.tolist() == echoes([1, 2], len(tokens) + 1)[-1:]


def test_closing_the_session_or_the_client_ends_it_with_the_reason(cluster: shmsched.Cluster) -> None:
    client = cluster.client()
    one, two = client.open_session(), client.open_session()
    streams = one.stream([1], further=15_000), two.stream([1], further=15_000)
    one.close()
    with pytest.raises(shmsched.SessionClosed):
        drain(streams[0])
    client.close()
    with pytest.raises(shmsched.ClientClosed):
        drain(streams[1])


def test_a_step_that_fails_leaves_the_session_before_it() -> None:
    with shmsched.launch(MOODY) as cluster, cluster.client() as client, client.open_session() as session:
        prompt, expected = prompt_that_meets(FAIL, avoiding=range(100, 109))
        n = expected.index(FAIL) + 1
        stream = session.stream(prompt, further=100)
        tokens = []
        with pytest.raises(shmsched.StepFailed, match="told to fail"):
            while True:
                tokens.append(stream.next(DEADLINE).token)
        assert tokens == expected[:n]
        assert session.position == 2 + n - 1
        assert session.submit([7]).result(DEADLINE).tokens.tolist() == echoes([*prompt, *tokens[:-1], 7], 1)


def test_cancels_of_another_thread_race_with_tokens_to_no_harm(client: shmsched.Client) -> None:
    with client.open_session() as session:
        fed: list[int] = []
        for i in range(60):
            stream = session.stream([i, i + 1], further=15_000 - len(fed))
            fed += [i, i + 1]
            canceller = threading.Timer(i / 5000, stream.cancel)
            canceller.start()
            got = []
            try:
                while True:
                    got.append(stream.next(DEADLINE).token)
            except EOFError:
                pass
            canceller.join()
            assert got == echoes(fed, len(got))
            fed = fed[: session.position] if not got else fed + got[: session.position - len(fed)]
            assert session.history.tolist() == fed


def test_a_stopped_client_stalls_its_generations_and_no_others(cluster: shmsched.Cluster) -> None:
    """The daemon holds one token for each of its generations, and goes on with the others'."""
    ring = 1 << 15
    greedy = cluster.client()
    sessions = [greedy.open_session() for _ in range(4)]
    # Its receiver stands still in a callback, so nothing is read.
    stuck, go_on = threading.Event(), threading.Event()
    sessions[0].submit([1]).add_done_callback(lambda _: (stuck.set(), go_on.wait(DEADLINE)))
    assert stuck.wait(DEADLINE)
    streams = [session.stream([9], further=15_000) for session in sessions]

    def stalled() -> bool:
        ledger = cluster.status()["ledger"]
        return ledger["queued"] == 4 and ledger["in_flight"] == 0

    wait_until(stalled, "the ring to be full and four steps to wait for room", 120)
    with cluster.client() as other, other.open_session() as session:
        assert drain(session.stream([3], further=50)) == echoes([3], 51)
    go_on.set()
    assert sum(len(drain(stream)) for stream in streams) == 4 * 15_001 > ring
    greedy.close()


def test_an_answer_says_how_long_its_step_was_queued() -> None:
    """One step takes 200 ms, and the engine takes one decode at a time."""
    with (
        shmsched.launch(f"echo?vocab={VOCAB}&step_us=200000", max_decode_sequences=1) as cluster,
        cluster.client() as client,
    ):
        sessions = [client.open_session() for _ in range(3)]
        first = sessions[0].submit([1])
        second = sessions[1].submit([1])
        stream = sessions[2].stream([1], further=2)
        waits = [first.result(DEADLINE).queue_wait, second.result(DEADLINE).queue_wait]
        drain(stream)
        waits.append(stream.queue_wait)
        assert all(wait is not None for wait in waits)
        # The second waits for a step, the third for two; how long the first waits is the machine's affair.
        assert waits[1] >= waits[0] + 0.1  # type: ignore[operator]
        assert waits[2] >= waits[1] + 0.1  # type: ignore[operator]
        prompt = sessions[0].submit([1] * 2000)
        assert prompt.result(DEADLINE).queue_wait < waits[2]  # type: ignore[operator]

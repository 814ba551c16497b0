"""A step's whole path: what comes back is what the engine computed, wherever it travelled."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import shmsched
from shmsched.workers.echo import PEAK, advance, answer

from processes.leftovers import shm_names, wait_until

VOCAB = 32000
DEADLINE = 30.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch("echo?vocab=32000", max_decode_sequences=4, max_prefill_chunk_size=16) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: shmsched.Cluster) -> Iterator[shmsched.Client]:
    with cluster.client(arena_bytes=8 << 20) as client:
        yield client


def test_a_sampled_step_gives_one_token_for_its_last_position(client: shmsched.Client) -> None:
    with client.open_session() as session:
        response = session.submit([1, 2, 3]).result(DEADLINE)
        assert response.tokens.dtype == np.int64
        assert response.tokens.tolist() == [answer(advance(0, [1, 2, 3]), VOCAB)]
        assert response.logits is None
        assert session.position == 3


def test_a_prompt_longer_than_a_chunk_is_split_and_the_future_is_the_last_chunks(client: shmsched.Client) -> None:
    prompt = list(range(100))
    with client.open_session() as session:
        assert session.submit(prompt).result(DEADLINE).tokens.tolist() == [answer(advance(0, prompt), VOCAB)]
        assert session.position == 100


def test_all_rows_answer_for_every_token(client: shmsched.Client) -> None:
    with client.open_session() as session:
        session.submit([5]).result(DEADLINE)
        drafted = [7, 8, 9]
        rows = session.submit(drafted, output_rows=shmsched.OutputRows.ALL).result(DEADLINE).tokens.tolist()
        assert rows == [answer(advance(0, [5, *drafted[: i + 1]]), VOCAB) for i in range(3)]


def test_no_rows_fills_the_cache_only(client: shmsched.Client) -> None:
    with client.open_session() as session:
        assert session.submit([1, 2], output_rows=shmsched.OutputRows.NONE).result(DEADLINE).tokens.size == 0
        assert session.submit([3], output_rows=shmsched.OutputRows.NONE, sampling=None).result(DEADLINE).logits is None
        assert session.submit([4]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [1, 2, 3, 4]), VOCAB)]


def test_raw_logits_are_a_read_only_view_of_shared_memory(client: shmsched.Client) -> None:
    with client.open_session() as session:
        response = session.submit([1, 2, 3], sampling=None, output_rows=shmsched.OutputRows.ALL).result(DEADLINE)
        assert response.logits is not None
        data = response.logits.data
        assert data.dtype == np.float32
        assert data.shape == (3, VOCAB)
        assert not data.flags.writeable
        assert not data.flags.owndata
        expected = [answer(advance(0, [1, 2, 3][: i + 1]), VOCAB) for i in range(3)]
        assert data.argmax(axis=1).tolist() == expected
        assert data[2, expected[2]] == PEAK
        others = np.arange(VOCAB) != expected[0]
        assert (data[0][others] == ((np.arange(VOCAB) * 40503) & 0xFFFF)[others]).all()


def test_a_full_arena_raises_and_names_the_leases(client: shmsched.Client) -> None:
    with client.open_session() as session:
        held = []
        with pytest.raises(shmsched.Full, match=r"leases are held") as full:
            while True:
                held.append(session.submit([1], sampling=None).result(DEADLINE))
        assert f"{len(held)} leases" in str(full.value)
        held.pop()
        session.submit([1], sampling=None).result(DEADLINE)


def test_more_rows_than_the_arena_can_ever_hold_are_refused_with_the_sizes(cluster: shmsched.Cluster) -> None:
    with (
        cluster.client(arena_bytes=1 << 20) as client,
        client.open_session() as session,
        pytest.raises(shmsched.InvalidRequest, match=r"16 rows .* 2,048,128 bytes; the arena has 1,048,576"),
    ):
        session.submit(list(range(16)), sampling=None, output_rows=shmsched.OutputRows.ALL)


def test_position_below_the_length_rewinds(client: shmsched.Client) -> None:
    with client.open_session() as session:
        session.submit(list(range(40))).result(DEADLINE)
        response = session.submit([9, 9], position=np.int64(10)).result(DEADLINE)
        assert response.tokens.tolist() == [answer(advance(0, [*range(10), 9, 9]), VOCAB)]
        assert session.position == 12


def test_pipelined_steps_of_one_session_run_in_order(client: shmsched.Client) -> None:
    with client.open_session() as session:
        tokens = [random.Random(3).randrange(VOCAB) for _ in range(200)]
        futures = [session.submit([t]) for t in tokens]
        answers = [f.result(DEADLINE).tokens.tolist() for f in futures]
        assert answers == [[answer(advance(0, tokens[: i + 1]), VOCAB)] for i in range(200)]


def test_a_rewind_behind_chunks_of_the_same_batch_runs_after_them(client: shmsched.Client) -> None:
    with client.open_session() as session:
        first = session.submit([1, 2, 3, 4])
        second = session.submit([8, 9], position=2)
        assert first.result(DEADLINE).tokens.tolist() == [answer(advance(0, [1, 2, 3, 4]), VOCAB)]
        assert second.result(DEADLINE).tokens.tolist() == [answer(advance(0, [1, 2, 8, 9]), VOCAB)]


def test_request_and_response_carry_the_clients_own_ids(client: shmsched.Client) -> None:
    with client.open_session() as session:
        params = shmsched.RequestParams(position=0)
        request = shmsched.Request(request_id=77, session_id=session.session_id, tokens=[4, 5], params=params)
        response = client.submit(request).result(DEADLINE)
        assert (response.request_id, response.session_id) == (77, session.session_id)
        assert response.tokens.tolist() == [answer(advance(0, [4, 5]), VOCAB)]


def test_many_threads_share_one_client(client: shmsched.Client) -> None:
    def run(seed: int) -> None:
        rng = random.Random(seed)
        with client.open_session() as session:
            h = 0
            for _ in range(50):
                tokens = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 1, 2, 40]))]
                h = advance(h, tokens)
                assert session.submit(tokens).result(DEADLINE).tokens.tolist() == [answer(h, VOCAB)]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(run, range(16)))


def test_sampling_with_temperature_does_not_change_echo(client: shmsched.Client) -> None:
    with client.open_session(seed=7) as session:
        sampling = shmsched.SamplingParams(temperature=0.8, top_p=0.9, top_k=40)
        response = session.submit([1, 2], sampling=sampling).result(DEADLINE)
        assert response.tokens.tolist() == [answer(advance(0, [1, 2]), VOCAB)]


def test_in_a_steady_state_dev_shm_lists_nothing_of_ours(cluster: shmsched.Cluster, client: shmsched.Client) -> None:
    with client.open_session() as session:
        logits = session.submit([1], sampling=None).result(DEADLINE).logits
        # Those that others make at this moment have one for microseconds.
        wait_until(lambda: not shm_names(), "/dev/shm to list nothing of ours")
        assert logits is not None


def test_the_ledger_balances_after_all_this(cluster: shmsched.Cluster) -> None:
    ledger = cluster.status()["ledger"]
    assert ledger["balanced"]
    assert ledger["queued"] == ledger["in_flight"] == 0
    assert ledger["submitted"] > 500

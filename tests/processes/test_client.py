"""The client library's promises: refusals at the call, futures, fork, spawn, death of the daemon."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, as_completed, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmsched
from shmsched.workers.echo import advance, answer

from processes.leftovers import wait_until

VOCAB = 1000
DEADLINE = 30.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(
        f"echo?vocab={VOCAB}&max_sessions=4&max_session_tokens=500", max_prefill_chunk_size=16
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def slow() -> Iterator[shmsched.Cluster]:
    """One step takes 50 ms, so that what is submitted behind one is still queued a moment later."""
    with shmsched.launch(
        f"echo?vocab={VOCAB}&step_us=50000", max_decode_sequences=1, max_prefill_chunk_size=4
    ) as cluster:
        yield cluster


@pytest.fixture
def session(cluster: shmsched.Cluster) -> Iterator[shmsched.Session]:
    with cluster.client() as client, client.open_session() as session:
        yield session


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([1.5], "1.5"),
        ([], "empty"),
        ([-1], "-1"),
        ([1, VOCAB], str(VOCAB)),
        ([[1, 2]], r"\(1, 2\)"),
        (np.array([0.0, 2.0]), "0.0"),
        (["a"], "'a'"),
        ([10**30], "1000000000000000000000000000000"),
    ],
)
def test_tokens_that_cannot_be_are_refused_at_the_call(session: shmsched.Session, tokens: Any, named: str) -> None:
    with pytest.raises(shmsched.InvalidRequest, match=named):
        session.submit(tokens)
    assert session.position == 0
    assert session.submit([1]).result(DEADLINE).tokens.size == 1


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64])
def test_any_integer_dtype_is_taken(session: shmsched.Session, dtype: Any) -> None:
    response = session.submit(np.array([1, 2, 3], dtype)).result(DEADLINE)
    assert response.tokens.tolist() == [answer(advance(0, [1, 2, 3]), VOCAB)]


def test_what_can_never_run_is_refused_with_the_limit(session: shmsched.Session) -> None:
    with pytest.raises(shmsched.InvalidRequest, match="would hold 501 tokens; echo takes at most 500"):
        session.submit([0] * 501)
    with pytest.raises(shmsched.InvalidRequest, match="17 tokens; they must fit one chunk of 16"):
        session.submit([0] * 17, output_rows=shmsched.OutputRows.ALL)
    with pytest.raises(shmsched.InvalidRequest, match="position is 5; .* from 0 to 0 .session 1 goes on at 0;"):
        session.submit([0], position=5)
    assert session.position == 0


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"sampling": {"temperature": 0.7}}, r"sampling is \{'temperature': 0.7\}; a SamplingParams"),
        ({"sampling": 0.7}, "sampling is 0.7"),
        ({"output_rows": "all"}, "output_rows is 'all'"),
        ({"output_rows": 7}, "output_rows is 7"),
        ({"position": 0.5}, "position is 0.5; it must be"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_and_the_client_goes_on(session: shmsched.Session, bad: Any, named: str) -> None:
    with pytest.raises(shmsched.InvalidRequest, match=named):
        session.submit([1], **bad)
    params = shmsched.RequestParams(**bad)
    with pytest.raises(shmsched.InvalidRequest, match=named):
        session._client.submit(shmsched.Request(9, session.session_id, [1], params))
    assert session.submit([1]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [1]), VOCAB)]


def test_a_step_of_ones_own_is_never_split_and_its_id_is_free_once_settled(cluster: shmsched.Cluster) -> None:
    with cluster.client() as client, client.open_session() as session:
        with pytest.raises(shmsched.InvalidRequest, match="request 1 has 17 tokens; a step has at most 16"):
            client.submit(shmsched.Request(1, session.session_id, [0] * 17))
        assert client.submit(shmsched.Request(1, session.session_id, [0])).result(DEADLINE).request_id == 1
        again = shmsched.Request(1, session.session_id, [0], shmsched.RequestParams(position=1))
        assert client.submit(again).result(DEADLINE).request_id == 1


def test_a_repeated_id_is_refused_while_the_first_is_outstanding(slow: shmsched.Cluster) -> None:
    with slow.client() as client, client.open_session() as session:
        first = client.submit(shmsched.Request(1, session.session_id, [0]))
        with pytest.raises(shmsched.InvalidRequest, match="request 1 is still outstanding"):
            client.submit(shmsched.Request(1, session.session_id, [0], shmsched.RequestParams(position=1)))
        first.result(DEADLINE)


def test_open_session_waits_for_a_slot_or_says_full(cluster: shmsched.Cluster) -> None:
    with cluster.client() as client:
        held = [client.open_session() for _ in range(4)]
        with pytest.raises(shmsched.Full, match="4 of 4 in use"):
            client.open_session(block=False)
        with pytest.raises(shmsched.Full, match="within 0.05 s"):
            client.open_session(timeout=0.05)
        opened: list[shmsched.Session] = []
        waiter = threading.Thread(target=lambda: opened.append(client.open_session(timeout=DEADLINE)))
        waiter.start()
        held[0].close()
        waiter.join(DEADLINE)
        assert opened, "the session that waited was not opened when a slot became free"
        assert opened[0].submit([5]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [5]), VOCAB)]


def test_an_unknown_model_is_refused_with_the_names_served(
    session: shmsched.Session, cluster: shmsched.Cluster
) -> None:
    with cluster.client() as client, pytest.raises(shmsched.NoEngine, match="model 'gpt'; models served: echo"):
        client.open_session(model="gpt")


def test_futures_work_with_wait_as_completed_and_callbacks(session: shmsched.Session) -> None:
    futures = [session.submit([t]) for t in range(10)]
    called = threading.Event()
    futures[-1].add_done_callback(lambda f: called.set())
    assert set(as_completed(futures, DEADLINE)) == set(futures)
    assert not wait(futures, DEADLINE).not_done
    assert called.wait(DEADLINE), "the done-callback was not called"


def test_cancelling_a_queued_step_takes_it_and_the_later_ones_out(slow: shmsched.Cluster) -> None:
    with slow.client() as client, client.open_session() as session:
        running = session.submit([1])
        queued = session.submit([2])
        later = session.submit([3])
        assert queued.cancel()
        assert queued.cancelled()
        assert wait([queued, later], DEADLINE).not_done == set()
        with pytest.raises(CancelledError):
            later.result(0)
        assert session.position == 1
        assert running.result(DEADLINE).tokens.tolist() == [answer(advance(0, [1]), VOCAB)]
        assert session.submit([4]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [1, 4]), VOCAB)]
        ledger = slow.status()["ledger"]
        assert ledger["balanced"]
        assert ledger["cancelled"] == 2


def test_cancelling_a_long_prompt_cancels_it_as_a_whole(slow: shmsched.Cluster) -> None:
    with slow.client() as client, client.open_session() as session:
        before = slow.status()["ledger"]["cancelled"]
        prompt = session.submit(list(range(400)))
        assert prompt.cancel()
        assert session.position == 0
        assert session.submit([9]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [9]), VOCAB)]
        assert slow.status()["ledger"]["cancelled"] - before > 50
        assert not prompt.cancel() or prompt.cancelled()


def test_cancelling_takes_a_rewind_behind_it_along(slow: shmsched.Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with slow.client() as client, client.open_session() as session:
        history = list(range(10))
        session.submit(history).result(DEADLINE)
        first = session.submit([1, 2])
        rewound = session.submit([3, 4, 5], position=5)
        last = session.submit([6])
        assert first.cancel()
        assert not wait([rewound, last], DEADLINE).not_done
        # The rewind may have begun to run: only what is before it is known to stand.
        assert session.position == 5
        response = session.submit([9]).result(DEADLINE)
        assert response.tokens.tolist() == [answer(advance(0, [*history[:5], 9]), VOCAB)]
    assert caplog.records == []


def test_a_submission_that_waited_starts_where_the_session_stands_then(slow: shmsched.Cluster) -> None:
    """The daemon is stopped, so that room is what the first submission left; a shorter one overtakes the one that waits."""
    with slow.client() as client, client.open_session() as filler, client.open_session() as session:
        os.kill(slow.pid, signal.SIGSTOP)
        try:
            fill = filler.submit([1] * 4 * 8190)
            waited = threading.Thread(target=lambda: session.submit([2] * 12), daemon=True)
            waited.start()
            wait_until(lambda: client._channel.wait_for_room, "the long submission to wait for room")
            overtaking = session.submit([3])
        finally:
            os.kill(slow.pid, signal.SIGCONT)
        fill.cancel()
        waited.join(DEADLINE)
        overtaking.result(DEADLINE)
        assert session.position == 13
        response = session.submit([4]).result(DEADLINE)
        assert response.tokens.tolist() == [answer(advance(0, [3, *[2] * 12, 4]), VOCAB)]


def test_cancel_of_a_finished_step_says_no(session: shmsched.Session) -> None:
    future = session.submit([1])
    future.result(DEADLINE)
    assert not future.cancel()


def test_closing_a_session_settles_what_is_outstanding(slow: shmsched.Cluster) -> None:
    with slow.client() as client:
        session = client.open_session()
        futures = [session.submit([t]) for t in range(5)]
        session.close()
        for future in futures[1:]:
            with pytest.raises(shmsched.SessionClosed):
                future.result(DEADLINE)
        with pytest.raises(shmsched.SessionClosed, match="session 1 is closed"):
            session.submit([1])


def test_closing_the_client_settles_everything(slow: shmsched.Cluster) -> None:
    client = slow.client()
    session = client.open_session()
    future = session.submit([1])
    client.close()
    with pytest.raises(shmsched.ClientClosed):
        future.result(DEADLINE)
    with pytest.raises(shmsched.ClientClosed):
        session.submit([1])


def test_full_with_block_false_and_room_again_later(slow: shmsched.Cluster) -> None:
    with slow.client() as client, client.open_session() as session:
        # 8192 steps may be outstanding; a prompt of 4-token chunks takes one for each chunk.
        prompt = session.submit([1] * (4 * 8190))
        session.submit([2])
        session.submit([2])
        with pytest.raises(shmsched.Full, match="8192 steps are outstanding, of at most 8192"):
            session.submit([3], block=False)
        with pytest.raises(shmsched.Full, match=r"waiting 0.05 s"):
            session.submit([3], block_timeout=0.05)
        prompt.cancel()
        assert session.submit([3], block_timeout=DEADLINE).result(DEADLINE).tokens.size == 1


def test_a_callback_never_waits(slow: shmsched.Cluster) -> None:
    """A submit on the receiver's thread that would wait for room can only be answered by that very thread."""
    with slow.client() as client, client.open_session() as session, client.open_session() as other:
        raised: list[BaseException] = []
        done = threading.Event()

        def submit_more(_: object) -> None:
            try:
                for _ in range(5):
                    other.submit([1])
            except shmsched.ShmschedError as e:
                raised.append(e)
            done.set()

        first = session.submit([1])
        other.submit([1] * (4 * 8190))
        first.add_done_callback(submit_more)
        assert done.wait(DEADLINE), "the callback did not return: it waited on the receiver's thread"
        assert raised
        assert isinstance(raised[0], shmsched.Full)
        assert "callback cannot wait" in str(raised[0])


def use_a_client(socket: str) -> None:
    with shmsched.Client(socket=socket) as client, client.open_session() as session:
        assert session.submit([1, 2]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [1, 2]), VOCAB)]


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_clients_work_under_every_start_method(cluster: shmsched.Cluster, method: str) -> None:
    context = multiprocessing.get_context(method)
    process = context.Process(target=use_a_client, args=(str(cluster.socket),))
    process.start()
    process.join(DEADLINE)
    assert process.exitcode == 0


def test_the_daemons_death_fails_every_future_at_once() -> None:
    with shmsched.launch("echo?step_us=10000000") as cluster:
        client = cluster.client()
        session = client.open_session()
        future = session.submit([1])
        os.kill(cluster.pid, signal.SIGKILL)
        with pytest.raises(shmsched.SchedulerDied, match=f"pid {cluster.pid}"):
            future.result(5)
        with pytest.raises(shmsched.SchedulerDied):
            session.submit([1])
        with pytest.raises(shmsched.SchedulerDied):
            client.open_session()


def test_no_daemon_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(shmsched.SchedulerUnreachable, match="there is no such socket. `shmsched up` starts one"):
        shmsched.Client(socket=tmp_path / "none.sock")
    for nowhere in (tmp_path, tmp_path / "missing" / "s"):
        with pytest.raises(shmsched.SocketPathError, match=r"directory; give it|cannot be used: No such"):
            shmsched.Client(socket=nowhere)


def test_models_tell_the_limits_in_force(cluster: shmsched.Cluster) -> None:
    with cluster.client() as client:
        model = client.models["echo"]
        assert model.info.vocab_size == VOCAB
        assert model.info.max_session_tokens == 500
        assert model.max_prefill_chunk_size == 16
        with pytest.raises(shmsched.Unsupported, match="no tokenizer"):
            _ = model.tokenizer


def test_a_callback_of_a_cancel_may_wait(slow: shmsched.Cluster) -> None:
    """It runs in the canceller's thread, and the receiver must be free to answer what it waits for."""
    with slow.client() as client, client.open_session() as session, client.open_session() as other:
        session.submit([1])
        future = session.submit([2])
        answers: list[Any] = []
        future.add_done_callback(lambda _: answers.append(other.submit([5]).result(DEADLINE)))
        assert future.cancel()
        assert answers[0].tokens.tolist() == [answer(advance(0, [5]), VOCAB)]


def test_a_callback_cannot_open_a_session_and_is_told_so(session: shmsched.Session) -> None:
    raised: list[BaseException] = []
    done = threading.Event()

    def open_another(_: object) -> None:
        try:
            session._client.open_session(block=False)
        except shmsched.ShmschedError as e:
            raised.append(e)
        done.set()

    session.submit([1]).add_done_callback(open_another)
    assert done.wait(DEADLINE), "the callback did not return: it waited for an answer that its own thread receives"
    assert isinstance(raised[0], shmsched.Full)


def test_a_callback_that_exits_ends_its_client_and_leaves_nobody_waiting(
    cluster: shmsched.Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    def leave(_: object) -> None:
        raise SystemExit(3)

    with cluster.client() as client, client.open_session() as session:
        session.submit([1]).add_done_callback(leave)
        wait_until(lambda: client._channel.dead is not None, "the receiver to end")
        with pytest.raises(shmsched.ClientClosed, match="SystemExit"):
            session.submit([2])
    assert "SystemExit" in capfd.readouterr().err


def test_a_bad_seed_takes_no_slot(cluster: shmsched.Cluster) -> None:
    with cluster.client() as client:
        for _ in range(10):
            with pytest.raises(shmsched.InvalidRequest, match="seed is -1"):
                client.open_session(seed=-1)
        client.open_session(block=False).close()


def test_an_interrupt_in_a_submit_leaves_the_client_whole(cluster: shmsched.Cluster) -> None:
    """KeyboardInterrupt may be raised between any two lines of submit; the ring must not be ahead of its frames."""
    program = (
        "import shmsched, signal, sys\n"
        "client = shmsched.Client(socket=sys.argv[1])\n"
        "session = client.open_session()\n"
        "interrupted = 0\n"
        "while interrupted < 40:\n"
        "    try:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0.002)\n"
        "        for _ in range(100): session.submit([1] * 4, position=0)\n"
        "    except KeyboardInterrupt:\n"
        "        interrupted += 1\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "with client.open_session() as other: print(other.submit([1]).result(30).tokens.size)\n"
    )
    program = "import signal\nsignal.signal(signal.SIGALRM, signal.default_int_handler)\n" + program
    run = [sys.executable, "-c", program, str(cluster.socket)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "1\n", done.stderr


def test_a_closed_client_keeps_no_arena_even_if_somebody_keeps_the_client(cluster: shmsched.Cluster) -> None:
    """Arenas are large; only logits that are still held may keep one mapped."""

    def mapped() -> int:
        total = 0
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/dev/shm/shmsched" in line:
                start, end = line.split()[0].split("-")
                total += int(end, 16) - int(start, 16)
        return total

    before = mapped()
    client = cluster.client(arena_bytes=64 << 20)
    with client.open_session() as session:
        kept = session.submit([1], sampling=None).result(DEADLINE).logits
    assert kept is not None
    client.close()
    assert mapped() - before >= 64 << 20
    assert kept.data.shape == (1, VOCAB)
    del kept
    assert mapped() - before < 64 << 20

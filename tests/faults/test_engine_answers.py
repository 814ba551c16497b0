"""What an engine may not say, and what is said of one that says nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shmsched
from shmsched.dataplane.layouts import StepStatus
from shmsched.wire import frames
from shmsched.wire.link import Link

from processes import engines as moods
from processes.leftovers import wait_until
from support.peers.by_hand import VOCAB, EngineByHand

DEADLINE = 30.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def by_hand(cluster: shmsched.Cluster) -> Iterator[EngineByHand]:
    with EngineByHand(cluster.socket) as engine:
        yield engine


@pytest.fixture
def client(cluster: shmsched.Cluster, by_hand: EngineByHand) -> Iterator[shmsched.Client]:
    with cluster.client() as client:
        wait_until(lambda: "echo" in client.models, "the client to hear of the model")
        yield client


def statuses(*values: int) -> Callable[[EngineByHand], None]:
    return lambda engine: _write(engine, engine._layout.statuses_offset, np.uint8, values)


def tokens(*values: int) -> Callable[[EngineByHand], None]:
    return lambda engine: _write(engine, engine._layout.ids_offset, np.int32, values)


def _write(engine: EngineByHand, at: int, dtype: Any, values: tuple[int, ...]) -> None:
    np.frombuffer(engine._buffer, dtype, len(values), engine.at + at)[:] = values


@pytest.mark.parametrize(
    ("results", "messages", "named"),
    [
        ([], (), "status 0"),
        ([statuses(StepStatus.DONE, 77)], (), "status 77"),
        ([statuses(StepStatus.DONE, StepStatus.DONE), tokens(1, VOCAB)], (), f"token {VOCAB} is outside"),
        ([statuses(StepStatus.DONE, StepStatus.DONE), tokens(-5, 1)], (), "token -5 is outside"),
        ([statuses(StepStatus.DONE, StepStatus.FAILED), tokens(1, 2)], (), "0 messages came for 1 failed"),
        ([statuses(StepStatus.DONE, StepStatus.DONE), tokens(1, 2)], ("why",), "1 messages came for 0 failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_results_that_do_not_fit_fail_their_batch_and_nothing_of_them_gets_through(
    client: shmsched.Client, by_hand: EngineByHand, results: list[Any], messages: tuple[str, ...], named: str
) -> None:
    holding, *sessions = (client.open_session() for _ in range(3))
    # While this one runs, the others come together.
    held = holding.submit([9])
    batch = by_hand.work()
    futures = [session.submit([token]) for token, session in enumerate(sessions)]
    bystander = client.open_session(block=False)
    by_hand.answer(batch, 5)
    assert held.result(DEADLINE).tokens.tolist() == [5]
    batch = by_hand.work()
    assert len(by_hand.steps()) == 2
    for write in results:
        write(by_hand)
    by_hand.send(frames.Done(batch, messages))
    # Said a second time, right or wrong, it is no answer to anything.
    by_hand.send(frames.Done(batch, ()))
    by_hand.send(frames.BatchFailed(batch, "once more"))
    for session, future in zip(sessions, futures, strict=True):
        with pytest.raises(shmsched.EngineError, match=f"results that do not fit: .*{named}"):
            future.result(DEADLINE)
        wait_until(lambda s=session: s.ended is not None, "the session to be lost")
        assert isinstance(session.ended, shmsched.SessionLost)
    # The engine goes on, and so do the sessions that had no part in it.
    future = bystander.submit([1])
    by_hand.answer(by_hand.work(), 7)
    assert future.result(DEADLINE).tokens.tolist() == [7]
    for session in (holding, bystander):
        session.close()


@pytest.mark.parametrize(
    ("offer", "named"),
    [
        (frames.Offer(50, 8, 1000, 0, 0, 0, 1, 0, "echo", "", (), "odd"), "a vocabulary of 50; engine by hand .* 1000"),
        (
            frames.Offer(VOCAB, 8, 1000, 0, 0, 0, 1, 0, "echo", "bytes", (), "odd"),
            "the tokenizer bytes; engine by hand serves it with none",
        ),
        (
            frames.Offer(VOCAB, 8, 1000, 0, 0, 0, 1, 0, "echo", "", (7,), "odd"),
            r"the stop tokens \[7\]; engine by hand serves it with \[\]",
        ),
    ],
    ids=["vocabulary", "tokenizer", "stop tokens"],
)
def test_an_engine_that_is_no_other_of_its_model_is_refused_in_words(
    cluster: shmsched.Cluster, client: shmsched.Client, offer: frames.Offer, named: str
) -> None:
    link = Link.connect(cluster.socket, frames.Role.ENGINE)
    link.send(offer)
    heard: list[Any] = []
    while (arrived := link.receive(DEADLINE)) is not None:
        assert arrived, "waited in vain for a refusal"
        heard += arrived
    link.close()
    (refused,) = heard
    assert refused.code == shmsched.errors.ErrorCode.PROTOCOL
    assert re.search(
        f"engine odd serves model 'echo' with {named}.*Give one of them another model name", refused.message
    )


def test_a_silent_engine_is_named_in_the_log_while_it_lasts(capfd: pytest.CaptureFixture[str]) -> None:
    """Its process, its batch, for whom, and for how long; not only once it is killed."""
    with (
        shmsched.launch(f"{moods.__file__}:Moody", step_timeout_s=3.0) as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        future = session.submit([moods.HANG])
        err = ""

        def logged() -> bool:
            nonlocal err
            err += capfd.readouterr().err
            return "has been silent" in err

        wait_until(logged, "the log to tell of the engine")
        assert not future.done()
        (engine,) = cluster.status()["engines"]
        number = cluster.status()["clients"][0]["client"]
        told = {"session": session.session_id, "client": number, "pid": os.getpid()}
        assert engine["in_flight"]["sessions"] == [told], "by the client's own number"
        waiting = f"waiting: session {session.session_id} of client {number} (pid {os.getpid()})"
        assert re.search(
            rf"\(pid {engine['pid']}\) has been silent for 1\.\d+ s; it has not finished batch 1 of 1 step;"
            rf" {re.escape(waiting)}. After 3 s it is killed",
            err,
        ), err
        with pytest.raises(shmsched.EngineTimeout):
            future.result(DEADLINE)
        err += capfd.readouterr().err
        assert err.count("has been silent") == 1
        assert f"within 3 s; it is killed; {waiting}" in err


def test_an_engine_that_answers_in_time_is_not_named(capfd: pytest.CaptureFixture[str]) -> None:
    """The timer that looks after it is set once and again, while one batch follows the other."""
    with (
        shmsched.launch("echo?step_us=100000", step_timeout_s=0.8) as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        for token in range(15):
            session.submit([token]).result(DEADLINE)
    assert "silent" not in capfd.readouterr().err

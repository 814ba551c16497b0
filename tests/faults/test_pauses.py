"""Everything is stopped for a while, as by a machine that sleeps or is snapshot: the time counts against nobody."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import shmsched
from shmsched.workers.echo import advance, answer

from faults.watched import Record
from processes.leftovers import wait_until

VOCAB = 1000
DEADLINE = 30.0
STEP_TIMEOUT_S = 1.5
PAUSE_S = 2.5


def running(cluster: shmsched.Cluster) -> bool:
    return any(engine["in_flight"] for engine in cluster.status()["engines"])


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """They do not run until the end of the block, and then go on in this order."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def engine_of(cluster: shmsched.Cluster) -> dict[str, Any]:
    (engine,) = cluster.status()["engines"]
    return dict(engine)


def check_nobody_was_restarted(cluster: shmsched.Cluster, engine: int) -> None:
    status = cluster.status()
    assert [e["pid"] for e in status["engines"]] == [engine]
    assert [w["restarts"] for w in status["workers"]] == [0]


@pytest.mark.parametrize(
    ("step_s", "engine_is_late"), [(0.8, False), (4.2, True)], ids=["together", "the engine a second after the daemon"]
)
def test_an_engine_is_not_killed_for_the_time_in_which_nobody_ran(
    step_s: float, engine_is_late: bool, tmp_path: Path
) -> None:
    """The step takes less than its time-out, for as long as anybody runs."""
    record = Record(tmp_path)
    with (
        shmsched.launch(f"{record.spec}?step_us={step_s * 1e6:.0f}", step_timeout_s=STEP_TIMEOUT_S) as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        engine = engine_of(cluster)["pid"]
        future = session.submit([7])
        wait_until(record.started, "the step to run")
        began = time.monotonic()
        with stopped(engine):
            with stopped(cluster.pid):
                time.sleep(PAUSE_S)
            if engine_is_late:
                time.sleep(0.7)
        assert future.result(DEADLINE).tokens.tolist() == [answer(advance(0, [7]), VOCAB)]
        assert time.monotonic() - began > STEP_TIMEOUT_S
        check_nobody_was_restarted(cluster, engine)


def test_an_engine_that_does_not_go_on_after_a_pause_is_killed_all_the_same() -> None:
    with (
        shmsched.launch(f"echo?vocab={VOCAB}&step_us=800000", step_timeout_s=STEP_TIMEOUT_S) as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        engine = engine_of(cluster)["pid"]
        future = session.submit([7])
        wait_until(lambda: running(cluster), "the step to run")
        os.kill(engine, signal.SIGSTOP)
        with stopped(cluster.pid):
            time.sleep(PAUSE_S)
        with pytest.raises(shmsched.EngineTimeout):
            future.result(STEP_TIMEOUT_S + 4.0)


def submitted(session: shmsched.Session, tokens: Sequence[int], deadline: float) -> shmsched.StepFuture:
    return session.submit(tokens, deadline=time.monotonic() + deadline)


def test_a_deadline_is_later_by_the_time_in_which_the_daemon_did_not_run() -> None:
    """For a step that is queued as well as for one that nobody has read yet; and for one that comes later it is not."""
    with (
        shmsched.launch(f"echo?vocab={VOCAB}&step_us=600000") as cluster,
        cluster.client() as client,
        client.open_session() as first,
        client.open_session() as second,
        client.open_session() as third,
    ):
        engine = engine_of(cluster)["pid"]
        runs = first.submit([1])
        wait_until(lambda: running(cluster), "the step to run")
        queued = submitted(second, [2], 1.5)
        wait_until(lambda: engine_of(cluster)["queued"] == 1, "the next step to be queued")
        with stopped(cluster.pid, engine):
            unread = submitted(third, [3], 1.5)
            time.sleep(PAUSE_S)
        for future, token in ((runs, 1), (queued, 2), (unread, 3)):
            assert future.result(DEADLINE).tokens.tolist() == [answer(advance(0, [token]), VOCAB)]
        # Nothing is due in an idle daemon, whose clock nobody reads.
        with stopped(cluster.pid, engine):
            idle = submitted(third, [4], 1.0)
            time.sleep(1.5)
        assert idle.result(DEADLINE).tokens.size == 1
        runs = first.submit([4])
        wait_until(lambda: running(cluster), "the step to run")
        with pytest.raises(shmsched.DeadlineExceeded):
            submitted(second, [5], 0.2).result(DEADLINE)
        runs.result(DEADLINE)

"""The daemon gives way to an engine that has its next batch, and to nobody else."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

import shmsched
from shmsched.daemon.cpu_policy import CpuPolicy

from processes.leftovers import wait_until

DEADLINE = 30.0
pytestmark = pytest.mark.usefixtures("no_leftovers")


@pytest.fixture
def policy() -> Iterator[None]:
    yield
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def test_a_process_that_merely_holds_a_daemon_is_left_alone() -> None:
    CpuPolicy().set(True)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.usefixtures("policy")
def test_it_changes_back_and_forth() -> None:
    policy = CpuPolicy()
    policy.begin()
    for yields in (False, True, True, False, False, True):
        policy.set(yields)
        assert os.sched_getscheduler(0) == (os.SCHED_BATCH if yields else os.SCHED_OTHER)


@pytest.mark.usefixtures("policy")
def test_a_policy_that_was_chosen_for_it_stays() -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    policy = CpuPolicy()
    policy.begin()
    policy.set(True)
    assert os.sched_getscheduler(0) == os.SCHED_IDLE


@pytest.mark.usefixtures("policy")
def test_where_it_is_refused_the_daemon_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = CpuPolicy()
    policy.begin()

    def refuse(*_: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    policy.set(True)
    policy.set(False)
    monkeypatch.undo()
    policy.set(True)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_the_daemon_yields_while_generations_run_and_not_when_clients_drive() -> None:
    with shmsched.launch("echo?step_us=20000") as cluster, cluster.client() as client:
        pid = cluster.status()["pid"]
        stream = client.open_session().stream([1], further=100_000)
        wait_until(lambda: os.sched_getscheduler(pid) == os.SCHED_BATCH, "the daemon to give way")
        (engine,) = cluster.status()["engines"]
        os.kill(engine["pid"], signal.SIGKILL)
        assert stream.wait_until_ended(DEADLINE)
        client.open_session(timeout=DEADLINE).close()
        (engine,) = cluster.status()["engines"]
        assert os.sched_getscheduler(engine["pid"]) == os.SCHED_OTHER, "an engine has inherited the daemon's policy"
        stream = client.open_session().stream([1], further=100_000)
        wait_until(lambda: os.sched_getscheduler(pid) == os.SCHED_BATCH, "the daemon to give way")
        stream.cancel()
        session = client.open_session()
        token = 1
        for _ in range(5):
            token = int(session.submit([token]).result(DEADLINE).tokens[0])
        assert os.sched_getscheduler(pid) == os.SCHED_OTHER

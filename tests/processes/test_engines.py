"""An engine is user code: it may refuse, fail, defer, raise, hang or die, and the others go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import shmsched
from shmsched.dataplane.layouts import GUARD, aligned
from shmsched.workers.echo import advance, answer

from processes import engines as moods
from processes.leftovers import wait_until

ENGINES = Path(__file__).with_name("engines.py")
MOODY = f"{ENGINES}:Moody"
VOCAB = 1000
DEADLINE = 30.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(MOODY, engines=2, max_prefill_chunk_size=8) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: shmsched.Cluster) -> Iterator[shmsched.Client]:
    wait_until(lambda: ready(cluster) == 2, "both engines to be ready")
    with cluster.client() as client:
        yield client


def test_a_step_that_the_engine_fails_leaves_its_session_where_it_was(client: shmsched.Client) -> None:
    with client.open_session() as session:
        session.submit([1, 2]).result(DEADLINE)
        failed = session.submit([moods.FAIL])
        later = session.submit([3])
        with pytest.raises(shmsched.StepFailed, match="told to fail this step"):
            failed.result(DEADLINE)
        with pytest.raises(shmsched.ShmschedError):
            later.result(DEADLINE)
        assert session.position == 2
        assert session.submit([4]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [1, 2, 4]), VOCAB)]


def test_a_failing_chunk_fails_its_whole_submission(client: shmsched.Client) -> None:
    with client.open_session() as session:
        prompt = [1] * 20 + [moods.FAIL] + [1] * 40
        with pytest.raises(shmsched.StepFailed, match="told to fail this step"):
            session.submit(prompt).result(DEADLINE)
        assert session.position in range(0, 17, 8)
        session.submit([5], position=0).result(DEADLINE)


def test_a_deferred_step_runs_later_and_nothing_is_lost() -> None:
    with shmsched.launch(f"{MOODY}?step_us=50000") as cluster, cluster.client() as client:
        busy, deferring, other = (client.open_session() for _ in range(3))
        # However they share batches, one of the three is deferred once and goes with a later batch.
        futures = [busy.submit([1]), deferring.submit([moods.DEFER_ONCE]), other.submit([2])]
        answers = [future.result(DEADLINE).tokens.tolist() for future in futures]
        assert answers == [[answer(advance(0, [t]), VOCAB)] for t in (1, moods.DEFER_ONCE, 2)]
        assert cluster.status()["ledger"]["completed"] == 3
        assert cluster.status()["engines"][0]["batches"] >= 2


def test_when_everything_is_deferred_the_youngest_session_makes_room(client: shmsched.Client) -> None:
    with client.open_session() as session:
        with pytest.raises(shmsched.SessionLost, match="deferred everything"):
            session.submit([moods.DEFER_ALWAYS]).result(DEADLINE)
        with pytest.raises(shmsched.SessionLost):
            session.submit([1])


@pytest.mark.prints("RuntimeError: the engine was told to raise")
def test_an_engine_that_raises_fails_the_batch_and_goes_on(client: shmsched.Client) -> None:
    with client.open_session() as session:
        with pytest.raises(shmsched.EngineError, match="RuntimeError: the engine was told to raise"):
            session.submit([moods.RAISE]).result(DEADLINE)
        wait_until(lambda: session.ended is not None, "the session to be lost")
        with pytest.raises(shmsched.SessionLost):
            session.submit([1])
    with client.open_session() as again:
        again.submit([1]).result(DEADLINE)


def test_options_that_the_engine_refuses_come_back_as_its_words(client: shmsched.Client) -> None:
    with pytest.raises(shmsched.EngineError, match="ValueError: these options are refused"):
        client.open_session(options=b"refuse")
    client.open_session().close()


def test_a_token_outside_the_vocabulary_is_never_passed_on(client: shmsched.Client) -> None:
    with (
        client.open_session() as session,
        pytest.raises(shmsched.StepFailed, match="token 1000; the vocabulary has 1000"),
    ):
        session.submit([moods.BAD_TOKEN]).result(DEADLINE)


def test_a_slot_is_used_again_after_close_and_holds_nothing_of_before(client: shmsched.Client) -> None:
    for _ in range(40):
        with client.open_session() as session:
            assert session.submit([1]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [1]), VOCAB)]


def test_new_sessions_go_to_the_least_loaded_engine(client: shmsched.Client, cluster: shmsched.Cluster) -> None:
    sessions = [client.open_session() for _ in range(8)]
    assert sorted(e["sessions"] for e in cluster.status()["engines"]) == [4, 4]
    for session in sessions:
        session.close()


def test_an_engine_that_dies_loses_its_own_sessions_only_and_is_started_again(
    client: shmsched.Client, cluster: shmsched.Cluster
) -> None:
    doomed, other = client.open_session(), client.open_session()
    assert doomed.engine != other.engine
    other.submit([1]).result(DEADLINE)
    with pytest.raises(shmsched.EngineDied, match="ended while it ran batch"):
        doomed.submit([moods.DIE]).result(DEADLINE)
    assert other.submit([2]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [1, 2]), VOCAB)]
    with client.open_session() as again:
        assert again.engine == other.engine
    other.close()
    wait_until(lambda: ready(cluster) == 2, "the dead engine to be started again")
    assert cluster.status()["ledger"]["balanced"]


def test_a_killed_engine_returns_the_rows_it_may_have_been_writing(cluster: shmsched.Cluster) -> None:
    """Rule 3: rows of a step in flight are the client's again only once the engine's process is gone."""
    wait_until(lambda: ready(cluster) == 2, "both engines to be ready")
    with cluster.client(arena_bytes=2 * aligned(VOCAB * 4 + 2 * GUARD)) as client:
        for _ in range(4):
            session = client.open_session()
            with pytest.raises(shmsched.EngineDied):
                session.submit([moods.DIE], sampling=None).result(DEADLINE)
            wait_until(lambda: client._channel.arena._allocator.held == 0, "the rows to come back")  # type: ignore[union-attr]
            wait_until(lambda: ready(cluster) == 2, "the engine to be started again")


def test_an_engine_that_gives_no_result_fails_the_step_and_one_that_cannot_rewind_says_so() -> None:
    with (
        shmsched.launch(f"{ENGINES}:Forgetful") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        assert session.submit([1, 2]).result(DEADLINE).tokens.tolist() == [999]
        with pytest.raises(shmsched.Unsupported, match="cannot rewind"):
            session.submit([1], position=0)
        with pytest.raises(shmsched.StepFailed, match="gave no result for row 0"):
            session.submit([moods.NO_RESULT]).result(DEADLINE)


@pytest.mark.parametrize("sampling", [shmsched.SamplingParams(), None])
def test_where_the_tokens_of_a_failed_step_cannot_be_given_back_the_session_is_lost(
    sampling: shmsched.SamplingParams | None,
) -> None:
    """Nothing could follow them; another session in its place can."""
    with (
        shmsched.launch(f"{ENGINES}:Forgetful") as cluster,
        cluster.client() as client,
        client.open_session() as session,
        client.open_session() as other,
    ):
        session.submit([1, 2]).result(DEADLINE)
        with pytest.raises(shmsched.StepFailed, match="gave no result for row 0"):
            session.submit([moods.NO_RESULT], sampling=sampling).result(DEADLINE)
        words = r"its step at position 2 failed \(the engine gave no result for row 0 of this step\), .* cannot rewind"
        wait_until(lambda: session.ended is not None, "the session to be lost")
        for go_on in (lambda: session.submit([3]), lambda: session.generate([3], max_new_tokens=2)):
            with pytest.raises(shmsched.SessionLost, match=words):
                go_on()
        session.reopen(DEADLINE)
        assert list(session.generate([3], max_new_tokens=2)) == [999, 999]
        assert other.submit([1]).result(DEADLINE).tokens.tolist() == [999]
        assert cluster.status()["ledger"]["balanced"]


def test_where_they_can_be_given_back_it_goes_on() -> None:
    with (
        shmsched.launch(f"{ENGINES}:Mute") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        with pytest.raises(shmsched.StepFailed, match="gave token 1000"):
            session.submit([5, moods.NO_RESULT]).result(DEADLINE)
        assert session.submit([3]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [3]), VOCAB)]
        with pytest.raises(shmsched.StepFailed, match="gave token 1000"):
            session.submit([moods.NO_RESULT]).result(DEADLINE)
        wait_until(lambda: session.ended is not None, "the session to be lost")
        with pytest.raises(shmsched.SessionLost, match="can rewind to the beginning only"):
            session.submit([3])


def test_an_engine_that_does_not_start_ends_the_daemon_with_its_reason(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(shmsched.EngineStartError, match="RuntimeError: no weights here"):
        shmsched.launch(f"{ENGINES}:Unstartable")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("spec", "named"), [("nonesuch", "no engine is named 'nonesuch'"), ("echo?vocab=many", "option vocab is 'many'")]
)
def test_a_bad_spec_is_named(spec: str, named: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(shmsched.EngineStartError, match=named):
        shmsched.launch(spec)
    assert capfd.readouterr().err == ""


def test_an_engine_of_the_same_model_with_another_vocabulary_is_refused_in_words(cluster: shmsched.Cluster) -> None:
    attached = subprocess.run(
        [sys.executable, "-m", "shmsched.engine", "echo?vocab=50", "--socket", str(cluster.socket)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert attached.returncode == 1
    assert "with a vocabulary of 50" in attached.stderr
    assert ready(cluster) == 2


def test_two_models_are_served_side_by_side_and_one_must_be_named() -> None:
    with (
        shmsched.launch("echo?vocab=50&model=small", "echo?vocab=60&model=large") as cluster,
        cluster.client() as client,
    ):
        assert set(client.models) == {"small", "large"}
        with pytest.raises(shmsched.InvalidRequest, match="name one of large, small"):
            client.open_session()
        with client.open_session(model="large") as session:
            assert session.submit([55]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [55]), 60)]


def test_what_no_model_name_means_does_not_depend_on_who_is_up() -> None:
    with shmsched.launch(f"{MOODY}?model=a", "echo?model=b") as cluster, cluster.client() as client:
        with pytest.raises(shmsched.EngineDied):
            client.open_session(model="a").submit([moods.DIE]).result(DEADLINE)
        with pytest.raises(shmsched.InvalidRequest, match="name one of a, b"):
            client.open_session()
        with pytest.raises(shmsched.Full, match="no engine of model 'a' is ready yet"):
            client.open_session(model="a", block=False)
        client.open_session(model="a", timeout=DEADLINE).close()


def test_serve_hosts_an_engine_from_ones_own_program(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom shmsched.engine import serve\nfrom shmsched.workers.echo import Echo\n"
        "serve(Echo(vocab=70), sys.argv[1])\nprint('the daemon has ended')\n"
    )
    with shmsched.launch() as cluster, cluster.client() as client:
        host = subprocess.Popen([sys.executable, program, cluster.socket], stdout=subprocess.PIPE, text=True)
        wait_until(lambda: ready(cluster) == 1, "the engine to attach")
        wait_until(lambda: "echo" in client.models, "the client to hear of the model")
        with client.open_session() as session:
            assert session.submit([55]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [55]), 70)]
        cluster.close()
        assert host.communicate(timeout=DEADLINE)[0] == "the daemon has ended\n"


def ready(cluster: shmsched.Cluster) -> int:
    return sum(e["state"] == "ready" for e in cluster.status()["engines"])


def test_a_hanging_engine_is_killed_at_the_step_timeout_and_started_again() -> None:
    with (
        shmsched.launch(MOODY, engines=2, step_timeout_s=0.5) as cluster,
        cluster.client(arena_bytes=VOCAB * 4 + 2 * GUARD) as client,
    ):
        stuck, other = client.open_session(), client.open_session()
        other.submit([1]).result(DEADLINE)
        future = stuck.submit([moods.HANG], sampling=None)
        with pytest.raises(shmsched.EngineTimeout, match=r"has not finished batch 1 of 1 step within 0.5 s"):
            future.result(DEADLINE)
        assert other.submit([2]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [1, 2]), VOCAB)]
        wait_until(lambda: client._channel.arena._allocator.held == 0, "the rows to come back")  # type: ignore[union-attr]
        wait_until(lambda: ready(cluster) == 2, "the hanging engine to be started again")
        assert cluster.status()["ledger"]["balanced"]


def test_an_engine_that_dies_again_and_again_is_given_up_and_everybody_is_told_why() -> None:
    """New sessions are refused at once, and so are those that wait without end; who has a time-out waits for it."""
    why = (
        r"engine .*Moody\?model=a&max_sessions=1 is down: it died 5 times without completing a batch \(exit status 9\)"
    )
    with (
        shmsched.launch(f"{MOODY}?model=a&max_sessions=1", "echo?model=b") as cluster,
        cluster.client() as client,
        ThreadPoolExecutor(2) as pool,
    ):
        for _ in range(4):
            with pytest.raises((shmsched.EngineDied, shmsched.SessionLost)):
                client.open_session(model="a", timeout=DEADLINE).submit([moods.DIE]).result(DEADLINE)
        last = client.open_session(model="a", timeout=DEADLINE)
        endless = pool.submit(client.open_session, model="a")
        patient = pool.submit(client.open_session, model="a", timeout=DEADLINE)
        wait_until(lambda: cluster.status()["waiting_sessions"] == 2, "two sessions to wait")
        last.submit([moods.DIE])
        with pytest.raises(shmsched.NoEngine, match=why):
            endless.result(DEADLINE)
        (worker,) = [w for w in cluster.status()["workers"] if w["state"] == "given up"]
        assert "died 5 times" in worker["reason"]
        for timeout in (None, DEADLINE):
            with pytest.raises(shmsched.NoEngine, match=why):
                client.open_session(model="a", timeout=timeout)
        with client.open_session(model="b") as other:
            assert other.submit([1]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [1]), 32000)]
        assert not patient.done()
        command = [sys.executable, "-m", "shmsched.engine", "echo?model=a", "--socket", str(cluster.socket)]
        with subprocess.Popen(command) as attached:
            patient.result(DEADLINE).close()
            attached.kill()


def test_an_engine_that_takes_too_long_to_start_is_killed(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nfrom shmsched.workers.echo import Echo\n\n\nclass Slow(Echo):\n"
        "    def start(self, limits):\n        time.sleep(600)\n"
    )
    with pytest.raises(shmsched.EngineStartError, match="did not start within 2 s"):
        shmsched.launch(f"{tmp_path}/slow.py:Slow", start_timeout_s=2.0)


def test_an_engine_that_hangs_in_open_session_is_killed_too() -> None:
    with shmsched.launch(MOODY, step_timeout_s=0.5) as cluster, cluster.client() as client:
        with pytest.raises(shmsched.SessionLost, match=r"has not opened a session within 0.5 s"):
            client.open_session(options=b"hang", timeout=DEADLINE)
        wait_until(lambda: ready(cluster) == 1, "the engine to be started again")
        client.open_session(timeout=DEADLINE).close()


@pytest.mark.prints("RuntimeError: the engine was told to raise")
def test_an_engine_that_raises_in_close_session_goes_on() -> None:
    with shmsched.launch(MOODY) as cluster, cluster.client() as client, client.open_session() as other:
        client.open_session(options=b"raise on close").close()
        assert other.submit([1]).result(DEADLINE).tokens.tolist() == [answer(advance(0, [1]), VOCAB)]
        client.open_session().close()


def test_cancelling_what_an_engine_without_rewind_has_taken_ends_the_session_with_the_reason() -> None:
    with (
        shmsched.launch(f"{ENGINES}:Forgetful") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        session.submit([1, 2]).result(DEADLINE)
        running = session.submit([moods.HANG_A_MOMENT])
        wait_until(lambda: cluster.status()["engines"][0]["in_flight"], "the step to run")
        assert running.cancel()
        wait_until(lambda: session.ended is not None, "the session to be lost")
        with pytest.raises(shmsched.SessionLost, match="the engine cannot rewind"):
            session.submit([3])


def test_closed_clients_leave_nothing_in_the_daemon() -> None:
    """Descriptors and memory, at once: cycles that wait for the collector would fill /dev/shm and the table of descriptors."""
    with shmsched.launch("echo") as cluster:

        def held() -> tuple[int, int]:
            descriptors = len(list(Path(f"/proc/{cluster.pid}/fd").iterdir()))
            return descriptors, Path(f"/proc/{cluster.pid}/maps").read_text().count("/dev/shm/shmsched")

        wait_until(lambda: cluster.status()["clients"] == [], "the daemon to be at rest")
        before = held()
        for _ in range(30):
            with cluster.client(arena_bytes=1 << 20) as client, client.open_session() as session:
                session.submit([1], sampling=None).result(DEADLINE)
        # Fewer, where the connection that asked for the status was still being closed.
        rested = lambda: all(now <= then for now, then in zip(held(), before, strict=True))  # noqa: E731
        wait_until(rested, f"the daemon to hold at most {before} descriptors and mappings again")


def test_engines_that_died_leave_nothing_in_the_daemon() -> None:
    """At once, and not only when the watchdog of their last batch would have looked at them, after the step time-out."""
    with shmsched.launch("echo") as cluster, cluster.client() as client:

        def held() -> tuple[int, int]:
            descriptors = len(list(Path(f"/proc/{cluster.pid}/fd").iterdir()))
            return descriptors, Path(f"/proc/{cluster.pid}/maps").read_text().count("/dev/shm/shmsched")

        client.open_session().submit([1]).result(DEADLINE)
        before = held()
        for n in range(1, 4):
            os.kill(cluster.status()["engines"][0]["pid"], signal.SIGKILL)
            wait_until(lambda n=n: cluster.status()["workers"][0]["restarts"] == n, "the engine to be found dead")  # type: ignore[misc]
            wait_until(lambda: ready(cluster) == 1, "the engine to be started again")
            client.open_session().submit([1]).result(DEADLINE)
        wait_until(lambda: held() == before, f"the daemon to hold {before} descriptors and mappings again")


def test_sessions_that_wait_are_served_in_order_of_arrival_whatever_model_they_name() -> None:
    with shmsched.launch("echo?max_sessions=1") as cluster, cluster.client() as client:
        held = client.open_session()
        order: list[str] = []

        def wait_for(model: str | None, name: str) -> None:
            with client.open_session(model=model, timeout=DEADLINE):
                order.append(name)

        threads = []
        for model, name in (("echo", "first"), (None, "second"), ("echo", "third")):
            threads.append(threading.Thread(target=wait_for, args=(model, name)))
            threads[-1].start()
            wait_until(lambda: cluster.status()["waiting_sessions"] == len(threads), f"{name} to wait")
        held.close()
        for thread in threads:
            thread.join(DEADLINE)
        assert order == ["first", "second", "third"]

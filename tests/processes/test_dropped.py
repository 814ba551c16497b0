"""Sessions and clients that nobody refers to any more, and that nobody closed."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import shmsched

from processes.expected import VOCAB, echoes
from processes.leftovers import wait_until
from processes.loops import DEADLINE, Run


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(f"echo?vocab={VOCAB}&max_sessions=2&step_us=1000") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: shmsched.Cluster) -> Iterator[shmsched.Client]:
    with cluster.client() as client:
        yield client


def held(cluster: shmsched.Cluster) -> int:
    return sum(engine["sessions"] for engine in cluster.status()["engines"])


@contextmanager
def warned(n: int) -> Iterator[list[str]]:
    """Of ``n`` things that were dropped, by the end of the block."""
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", ResourceWarning)
        # A record of warnings would keep what they are about.
        warnings.showwarning = lambda message, *_, **__: said.append(str(message))
        yield said
    assert len(said) == n, said


def test_a_dropped_session_closes_at_once_though_its_client_is_idle(
    cluster: shmsched.Cluster, client: shmsched.Client
) -> None:
    with warned(1) as said:
        number = client.open_session().session_id
    assert f"session {number} of model 'echo'" in said[0]
    assert "close()" in said[0]
    wait_until(lambda: held(cluster) == 0, "the slot of a dropped session, with nobody sending anything")


def test_its_slot_is_there_for_whoever_asks_next(client: shmsched.Client) -> None:
    for _ in range(20):
        client.open_session()
        client.open_session(block=False)


def dropped_generation(client: shmsched.Client) -> None:
    next(client.open_session().generate([1, 2], max_new_tokens=500))


def dropped_step(client: shmsched.Client) -> None:
    assert client.open_session().submit([1, 2]).result(DEADLINE).tokens.tolist() == echoes([1, 2], 1)


def dropped_stream(client: shmsched.Client) -> None:
    client.open_session().stream([1], further=20).next(DEADLINE)


def dropped_fork(client: shmsched.Client) -> None:
    with client.open_session() as session:
        session.submit([1]).result(DEADLINE)
        session.fork()


def dropped_in_a_cycle(client: shmsched.Client) -> None:
    session = client.open_session()
    session.friend = [session]  # type: ignore[attr-defined]
    del session
    gc.collect()


def dropped_by_a_thread(client: shmsched.Client) -> None:
    thread = threading.Thread(target=client.open_session)
    thread.start()
    thread.join(DEADLINE)


@pytest.mark.parametrize(
    "drop",
    [dropped_generation, dropped_step, dropped_stream, dropped_fork, dropped_in_a_cycle, dropped_by_a_thread],
)
def test_whatever_held_it(
    cluster: shmsched.Cluster, client: shmsched.Client, drop: Callable[[shmsched.Client], None]
) -> None:
    with warned(1):
        drop(client)
        wait_until(lambda: held(cluster) == 0, "the slot")


def test_the_client_does_not_keep_sessions(client: shmsched.Client) -> None:
    with client.open_session() as session:
        session.submit([1]).result(DEADLINE)
        list(session.generate([2], max_new_tokens=3))
        reference = weakref.ref(session)
    del session
    assert reference() is None, "something of ours refers to a session that its user has forgotten"


def test_what_was_closed_lost_or_opened_again_says_nothing(cluster: shmsched.Cluster, client: shmsched.Client) -> None:
    with warned(0):
        session = client.open_session()
        session.close()
        session.reopen(DEADLINE)
        assert session.submit([1]).result(DEADLINE).tokens.tolist() == echoes([1], 1)
        session.close()
        del session
        with pytest.raises(shmsched.InvalidRequest):
            client.open_session(options=5)  # type: ignore[arg-type]
        other = cluster.client()
        open_still = other.open_session()
        other.close()
        del open_still, other
        gc.collect()


def test_an_opening_that_is_given_up_leaves_no_warning(client: shmsched.Client) -> None:
    with warned(0), client.open_session(), client.open_session():
        for timeout in (0.0, 0.001, 0.01):
            with pytest.raises(shmsched.Full):
                client.open_session(timeout=timeout)


def test_a_dropped_client_closes(cluster: shmsched.Cluster) -> None:
    before = len(cluster.status()["clients"])
    threads = threading.active_count()
    with warned(1) as said:
        shmsched.Client(socket=cluster.socket).open_session().close()
    assert str(cluster.socket) in said[0]
    wait_until(lambda: len(cluster.status()["clients"]) == before, "a dropped client to disconnect")
    wait_until(lambda: threading.active_count() == threads, "its thread to end")


def test_sessions_and_futures_keep_their_client(cluster: shmsched.Cluster) -> None:
    with warned(2):
        session = shmsched.Client(socket=cluster.socket).open_session()
        assert session.submit([1]).result(DEADLINE).tokens.tolist() == echoes([1], 1)
        del session
        gc.collect()


def test_a_finalizer_waits_for_no_lock(cluster: shmsched.Cluster, client: shmsched.Client) -> None:
    """It may run in the very thread that has the client's lock."""
    session = client.open_session()
    with warned(1):
        with client._channel.lock:
            began = time.monotonic()
            del session
            assert time.monotonic() - began < 1.0
        wait_until(lambda: held(cluster) == 0, "the slot")


@pytest.mark.parametrize("ask", ["submit", "stream", "generate", "fork", "position", "history"])
def test_the_next_call_waits_for_a_generation_that_was_dropped_where_nothing_waits(
    client: shmsched.Client, ask: str
) -> None:
    """A done-callback runs on the thread that receives: what is dropped there is closed by a thread of its own."""
    with client.open_session() as other, client.open_session() as session:
        generations = [session.generate([1], max_new_tokens=500)]
        given = next(generations[0])
        dropped = threading.Event()

        def drop(_: object) -> None:
            generations.clear()
            dropped.set()

        other.submit([2]).add_done_callback(drop)
        assert dropped.wait(DEADLINE), "the callback did not come"
        match ask:
            case "submit":
                assert session.submit([given]).result(DEADLINE).tokens.tolist() == echoes([1, given], 1)
            case "stream":
                assert session.stream([given], further=0).next(DEADLINE).token == echoes([1, given], 1)[0]
            case "generate":
                assert list(session.generate([], max_new_tokens=3)) == echoes([1], 4)[1:]
            case "fork":
                other.close()
                with session.fork(timeout=DEADLINE) as child:
                    assert list(child.generate([], max_new_tokens=3)) == echoes([1], 4)[1:]
            case "position":
                assert session.position == 1
            case "history":
                assert session.history.tolist() == [1]


def test_a_warning_that_is_an_error_closes_it_all_the_same(
    cluster: shmsched.Cluster, client: shmsched.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: raised.append(unraisable.exc_type))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        client.open_session()
    assert raised == [ResourceWarning]
    wait_until(lambda: held(cluster) == 0, "the slot")


def test_in_an_async_client(cluster: shmsched.Cluster, run: Run) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client:
            with warned(4):
                await client.open_session()
                await client.open_session(timeout=DEADLINE)
                assert (await (await client.open_session()).submit([1])).tokens.tolist() == echoes([1], 1)
                async for _ in (await client.open_session()).generate([1], max_new_tokens=50):
                    break
                deadline = time.monotonic() + DEADLINE
                while held(cluster):
                    assert time.monotonic() < deadline, "waited in vain for dropped sessions to close"
                    await asyncio.sleep(0.005)

    run(main())


def test_a_forked_child_sends_and_says_nothing(cluster: shmsched.Cluster, client: shmsched.Client) -> None:
    kept = [client.open_session()]
    child = os.fork()
    if child == 0:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                code = 0
                sys.unraisablehook = lambda unraisable: os._exit(3)
                kept.clear()
                gc.collect()
        except BaseException:
            code = 4
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert kept[0].submit([1]).result(DEADLINE).tokens.tolist() == echoes([1], 1)
    assert held(cluster) == 1
    kept[0].close()


@pytest.mark.parametrize(
    "program",
    [
        "session = client.open_session()",
        "session = client.open_session(); session.friend = session",
        "import builtins; builtins.kept = client.open_session()",
        "generation = client.open_session().generate([1], max_new_tokens=10000); next(generation)",
        "import sys; sys.kept = client; del client",
    ],
)
def test_the_end_of_the_interpreter_is_quiet(cluster: shmsched.Cluster, program: str) -> None:
    text = f"import shmsched\nclient = shmsched.Client(socket={str(cluster.socket)!r})\n{program}\n"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    wait_until(lambda: held(cluster) == 0, "its sessions to close")


def test_a_generation_that_was_dropped_in_a_task_leaves_the_session_free_at_once(
    cluster: shmsched.Cluster, run: Run
) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client, client.open_session() as session:
            for n in range(1, 6):
                generation = (
                    session.generate([], max_new_tokens=500) if n > 1 else session.generate([1], max_new_tokens=500)
                )
                assert await anext(generation) == echoes([1], n)[-1]
                del generation
            response = await session.submit([session.unfed])
            assert response.tokens.tolist() == echoes([1], 6)[-1:]

    run(main())

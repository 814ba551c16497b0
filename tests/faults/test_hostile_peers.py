"""Peers that lie: each gets an error or a closed connection, and an honest client beside it does not notice."""

from __future__ import annotations

import os
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmsched
from shmsched.dataplane.layouts import SAMPLING, StepStatus
from shmsched.errors import ErrorCode
from shmsched.wire import frames
from shmsched.wire.codec import pack
from shmsched.wire.framing import framed

from faults.decoding import DEADLINE, VOCAB, Decoding
from processes.leftovers import wait_until
from support.peers.client import ClientPeer
from support.peers.connection import Stranger, hello
from support.peers.engine import HONEST_OFFER, EnginePeer

NOBODY = 65534
U32, U64 = 2**32 - 1, 2**64 - 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(f"echo?vocab={VOCAB}&max_session_tokens=10000", max_clients=64) as cluster:
        yield cluster


@pytest.fixture
def honest(cluster: shmsched.Cluster, capfd: pytest.CaptureFixture[str]) -> Iterator[Decoding]:
    """It goes on before and after what the test does; and the daemon met no fault of its own."""
    with cluster.client() as client:
        decoding = Decoding(client)
        decoding.go_on(3)
        yield decoding
        decoding.go_on(3)
        assert cluster.status()["ledger"]["balanced"]
    assert "Traceback" not in capfd.readouterr().err
    wait_until(lambda: not cluster.status()["clients"], "the clients to be gone")
    wait_until(lambda: len(cluster.status()["engines"]) == 1, "the hostile engine to be gone")


class ThreadedOpening:
    """Opens a session of model m, while the test's own thread plays its engine."""

    def __init__(self, client: shmsched.Client) -> None:
        self._sessions: list[shmsched.Session] = []
        self._thread = threading.Thread(
            target=lambda: self._sessions.append(client.open_session(model="m", timeout=DEADLINE))
        )

    def session(self) -> shmsched.Session:
        self._thread.join(DEADLINE)
        return self._sessions[0]

    def __enter__(self) -> ThreadedOpening:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(DEADLINE)


class Heard(ClientPeer):
    """A client that keeps what it is told, and has session 1."""

    def __init__(self, cluster: shmsched.Cluster) -> None:
        self.told: list[Any] = []
        super().__init__(str(cluster.socket))
        self.wait_for(lambda: self.memory is not None, "a welcome")
        self.say(frames.OpenSession(1, 0, "echo", b""))
        self.wait_for(lambda: 1 in self.positions, "a session")

    def heard(self, message: Any) -> None:
        super().heard(message)
        self.told.append(message)

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        def read_and_look() -> object:
            self.read()
            return condition()

        wait_until(read_and_look, what)

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.told if isinstance(message, kind)]

    def lie(
        self,
        tokens_written: int = 1,
        cursors: tuple[int, int, int] = (0, 0, 0),
        stops: tuple[int, ...] = (),
        **lies: Any,
    ) -> None:
        step = self.step()._replace(**{"request": 1, **lies})
        self.submit(step, stop_tokens=stops, tokens_written=tokens_written, cursors=cursors)


@pytest.fixture
def liar(cluster: shmsched.Cluster, honest: Decoding) -> Iterator[Heard]:
    liar = Heard(cluster)
    yield liar
    liar.close()


CUT_SHORT = pack(frames.OpenSession(5, 0, "", b""))[:-1] + b"\x7f"
NO_TEXT = pack(frames.OpenSession(5, 0, "ab", b"")).replace(b"ab", b"\xff\xfe")
LET_GO = {
    "tokens never written": (lambda c: c.lie(tokens_written=0), "0 tokens|token ring is written up to 0"),
    "tokens beyond the ring": (lambda c: c.lie(tokens_written=U32, n_tokens=U32), "4294967295 tokens are announced"),
    "the token cursor backwards": (lambda c: c.lie(tokens_written=U64), "token ring is written up to 18446744073709551615"),
    "records read that were not written": (lambda c: c.lie(cursors=(1, 0, 0)), "read up to 1/0 were never written"),
    "results read that were not written": (lambda c: c.lie(cursors=(0, U64, 0)), "were never written"),
    "streamed tokens read that were not written": (lambda c: c.lie(cursors=(0, 0, 1)), "streamed tokens read up to 1"),
    "consumed beyond what was written": (lambda c: c.say(frames.Consumed(0, 0, U64)), "streamed tokens read up to"),
    "stop tokens that do not come": (lambda c: c.lie(n_stop_tokens=2), "0 stop tokens came"),
    "stop tokens that nobody announced": (lambda c: c.lie(stops=(1, 2)), "2 stop tokens came"),
    "a request number of 0": (lambda c: c.lie(request=0), "step 0 comes after step 0"),
    "a request number twice": (lambda c: [c.lie(), c.lie(tokens_written=2)], "step 1 comes after step 1"),
    "the same session twice": (lambda c: c.say(frames.OpenSession(1, 0, "echo", b"")), "session 1 is open already"),
    "a fork onto itself": (lambda c: c.say(frames.ForkSession(1, 1, 0)), "session 1 is open already"),
    "options too long": (lambda c: c.say(frames.OpenSession(2, 0, "echo", bytes(65537))), "options of 65537 bytes"),
    "an arena too large": (lambda c: c.say(frames.OpenArena(U64)), "an arena of 18446744073709551615 bytes"),
    "an arena of nothing": (lambda c: c.say(frames.OpenArena(0)), "an arena of 0 bytes"),
    "a second hello": (lambda c: c.say(hello(1)), "sent a Hello frame"),
    "an engine's frame": (lambda c: c.say(frames.Done(1, ())), "sent a Done frame"),
    "a control's frame": (lambda c: c.say(frames.Stop(0.0)), "sent a Stop frame"),
    "the daemon's own frame": (lambda c: c.say(frames.Work(1, 0)), "sent a Work frame"),
    "a frame of 4 GB": (lambda c: c.say_bytes(b"\xff\xff\xff\xff"), "a frame of -1 bytes"),
    "a frame of 2 GB": (lambda c: c.say_bytes(b"\x7f\xff\xff\xff"), "a frame of 2147483647 bytes"),
    "a frame of nothing": (lambda c: c.say_bytes(b"\0\0\0\0"), "a frame of 0 bytes"),
    "an unknown kind": (lambda c: c.say_bytes(framed(b"\xff\xff\0\0")), "a frame of unknown kind 65535"),
    "a part longer than its frame": (lambda c: c.say_bytes(framed(CUT_SHORT)), "does not fit"),
    "4 billion steps": (lambda c: c.say_bytes(framed(pack(frames.Submit(0, 0, 0, 0, []))[:-8] + b"\xff" * 8)), "does not fit"),
    "a text that is none": (lambda c: c.say_bytes(framed(NO_TEXT)), "not UTF-8"),
    "garbage": (lambda c: c.say_bytes(bytes(range(1, 200))), "a frame of 16909060 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("what", LET_GO)
def test_who_contradicts_what_it_was_told_is_let_go_in_words(liar: Heard, what: str) -> None:
    lie, words = LET_GO[what]
    lie(liar)  # type: ignore[no-untyped-call]
    liar.wait_for(lambda: liar.gone, "the connection to be closed")
    (refused,) = liar.of(frames.Refused)
    assert re.search(words, refused.message), refused.message
    assert refused.code == ErrorCode.PROTOCOL


REJECTED = {
    "a session that is not open": ({"session": 2}, ErrorCode.SESSION_CLOSED),
    "a session that no client has": ({"session": U64}, ErrorCode.SESSION_CLOSED),
    "a position that leaves a gap": ({"position": 1}, ErrorCode.INVALID_REQUEST),
    "a position beyond everything": ({"position": U32}, ErrorCode.INVALID_REQUEST),
    "output rows that are none": ({"output_rows": 3}, ErrorCode.INVALID_REQUEST),
    "rows outside the arena": ({"flags": 0, "rows_offset": 0}, ErrorCode.INVALID_REQUEST),
    "rows at the end of all memory": ({"flags": 0, "rows_offset": U64 - 3}, ErrorCode.INVALID_REQUEST),
    "further decodes without end": ({"further": U32}, ErrorCode.INVALID_REQUEST),
    "further decodes of a raw step": ({"flags": 0, "further": 1}, ErrorCode.INVALID_REQUEST),
    "a temperature that is no number": (
        {"sampling": SAMPLING.pack(0, float("nan"), 1.0, 0)},
        ErrorCode.INVALID_REQUEST,
    ),
    "a negative temperature": ({"sampling": SAMPLING.pack(0, -1.0, 1.0, 0)}, ErrorCode.INVALID_REQUEST),
    "a deadline that is no number": ({"deadline": float("nan")}, ErrorCode.INVALID_REQUEST),
    "a deadline that never comes": ({"deadline": float("inf")}, ErrorCode.INVALID_REQUEST),
    "a deadline before all time": ({"deadline": float("-inf")}, ErrorCode.INVALID_REQUEST),
}


@pytest.mark.parametrize("what", REJECTED)
def test_a_step_that_cannot_be_is_rejected_and_the_client_goes_on(liar: Heard, what: str) -> None:
    lies, code = REJECTED[what]
    liar.lie(**lies)
    liar.wait_for(lambda: liar.of(frames.Failed), "an answer")
    (failed,) = liar.of(frames.Failed)
    assert (failed.code, failed.requests) == (code, (1,))
    liar.lie(tokens_written=2, request=2)
    liar.wait_for(lambda: liar.cursors[0] == 1, "the next step to complete")


def test_rows_that_lie_in_the_arena_for_one_model_are_looked_at_anew_for_another() -> None:
    """What a step wants is remembered once it was checked; a row of the larger model would reach beyond the arena."""
    with shmsched.launch("echo?vocab=100", "echo?model=large&vocab=1000") as cluster:
        client = Heard(cluster)
        client.say(frames.OpenSession(2, 0, "large", b""))
        client.wait_for(lambda: 2 in client.positions, "a session of the other model")
        client.say(frames.OpenArena(4096))
        client.wait_for(lambda: client.of(frames.Arena), "the arena")
        rows: dict[str, Any] = {"flags": 0, "rows_offset": 3584}
        for i in range(3):
            client.lie(i + 1, (i, 0, 0), request=i + 1, position=i, **rows)
            client.wait_for(lambda n=i: client.cursors[0] == n + 1, "the logits")  # type: ignore[misc]
        client.lie(4, (3, 0, 0), request=4, session=2, **rows)
        client.wait_for(lambda: client.of(frames.Failed), "its refusal")
        (failed,) = client.of(frames.Failed)
        assert failed.code == ErrorCode.INVALID_REQUEST
        assert "do not lie in the arena of 4096 bytes" in failed.message
        client.close()


def test_stop_tokens_of_a_step_that_nothing_follows_are_read_past_each_time(liar: Heard) -> None:
    for i in range(3):
        liar.lie(i + 1, (i, 0, 0), (7,), request=i + 1, position=i, n_stop_tokens=1)
        liar.wait_for(lambda n=i: liar.cursors[0] == n + 1, "the answer")  # type: ignore[misc]


def test_too_many_stop_tokens_are_rejected(liar: Heard) -> None:
    liar.lie(further=1, n_stop_tokens=17, stops=tuple(range(17)))
    liar.wait_for(lambda: liar.of(frames.Failed), "an answer")
    assert "17 stop tokens; at most 16" in liar.of(frames.Failed)[0].message


@pytest.mark.parametrize("deadline", [-1.0, -1e308, 1e-300])
def test_a_deadline_that_has_passed_fails_the_step_or_is_too_late_to_matter(liar: Heard, deadline: float) -> None:
    liar.lie(deadline=deadline)
    liar.wait_for(lambda: liar.cursors[0] or liar.of(frames.Failed), "an answer")
    assert [f.code for f in liar.of(frames.Failed)] in ([], [ErrorCode.DEADLINE_EXCEEDED])


def test_what_another_client_has_is_out_of_reach(honest: Decoding, liar: Heard) -> None:
    """Ids are each client's own: the honest one's session is number 1 too, and so was its first step."""
    for session in (2, 3, U64):
        liar.say(frames.Halt(session, 1))
        liar.say(frames.Cancel(session, 0, 0))
        liar.say(frames.CloseSession(session))
        liar.say(frames.ForkSession(100 + session % 100, session, 0))
    liar.wait_for(lambda: len(liar.of(frames.SessionRefused)) == 3, "the forks to be refused")
    assert {r.code for r in liar.of(frames.SessionRefused)} == {ErrorCode.SESSION_CLOSED}
    liar.say(frames.Cancel(1, 0, 0))
    liar.say(frames.CloseSession(1))
    honest.go_on(10)


def test_nothing_follows_a_generation_and_a_client_that_never_reads_stalls_it(
    cluster: shmsched.Cluster, honest: Decoding, liar: Heard
) -> None:
    liar.lie(further=90)
    liar.lie(tokens_written=2, request=2, position=1)
    liar.wait_for(lambda: liar.of(frames.Failed), "an answer")
    assert "session 1 is generating" in liar.of(frames.Failed)[0].message
    liar.wait_for(lambda: liar.cursors[0] == 1, "the generation to end")
    assert liar.cursors[2] == 90


def test_descriptors_that_nobody_asked_for_are_not_taken(
    cluster: shmsched.Cluster, honest: Decoding, liar: Heard
) -> None:
    def held() -> int:
        return len(os.listdir(f"/proc/{cluster.pid}/fd"))

    before = held()
    for _ in range(50):
        liar.say_with_descriptors(frames.Consumed(0, 0, 0), 10)
        honest.go_on(1)
    liar.lie()
    liar.wait_for(lambda: liar.cursors[0] == 1, "a step to complete after all these")
    assert held() == before


def test_half_a_frame_and_no_more(cluster: shmsched.Cluster, honest: Decoding) -> None:
    whole = framed(pack(hello(1)))
    with Heard(cluster) as half, Stranger(str(cluster.socket)) as less:
        half.say_bytes(framed(pack(frames.OpenSession(2, 0, "echo", b"")))[:9])
        less.say_bytes(whole[:7])
        honest.go_on(20)
    wait_until(lambda: len(cluster.status()["clients"]) == 1, "both to be gone")


def test_tokens_and_completions_that_their_client_changes_later_hurt_it_alone(honest: Decoding, liar: Heard) -> None:
    memory = np.frombuffer(liar.memory, np.uint8)
    for request in range(1, 60):
        liar.lie(tokens_written=request, request=request, position=request - 1, cursors=(*liar.cursors[:2], 0))
        memory[:] = 255 if request % 2 else 0
        liar.wait_for(lambda n=request: liar.cursors[0] + len(liar.of(frames.Failed)) >= n, "an answer, whatever it is")
        if liar.of(frames.Failed):
            # The daemon had not copied the token yet: it was changed to one that is none.
            break
        honest.go_on(1)
    del memory


def test_ten_thousand_connections(cluster: shmsched.Cluster, honest: Decoding) -> None:
    """In bursts beyond the limit; most say nothing, and those that do not go by themselves give way."""
    path, made = str(cluster.socket), 0
    while made < 10_000:
        burst = []
        for _ in range(250):
            try:
                burst.append(Stranger(path))
            except BlockingIOError:
                # The backlog is full.
                break
            made += 1
            if made % 5 == 0:
                burst[-1].say(hello(made % 3))
        honest.go_on(1)
        if made % 2000 < 250:
            with cluster.client() as client:
                Decoding(client).go_on(1)
        for stranger in burst:
            stranger.close()
    wait_until(lambda: len(cluster.status()["clients"]) == 1, "all of them to be gone")


def test_connections_that_say_nothing_do_not_keep_others_out(cluster: shmsched.Cluster, honest: Decoding) -> None:
    silent = [Stranger(str(cluster.socket)) for _ in range(100)]
    with cluster.client() as client:
        Decoding(client).go_on(5)
    honest.go_on(5)
    for stranger in silent:
        stranger.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the directory and the socket would let it in."""
    with tempfile.TemporaryDirectory(prefix="shmsched-users-") as directory:
        monkeypatch.setenv("SHMSCHED_SOCKET", f"{directory}/s")
        with shmsched.launch(f"echo?vocab={VOCAB}") as cluster, cluster.client() as client:
            assert cluster.socket.parent == Path(directory)
            os.chmod(directory, 0o711)
            os.chmod(cluster.socket, 0o777)
            words, said = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    os.setuid(NOBODY)
                    with socket.socket(socket.AF_UNIX) as sock:
                        sock.connect(str(cluster.socket))
                        sock.settimeout(10)
                        os.write(said, sock.recv(4096))
                finally:
                    os._exit(0)
            os.close(said)
            os.waitpid(pid, 0)
            told = os.read(words, 4096)
            os.close(words)
            assert f"the peer runs as user {NOBODY}; this socket serves user 0 only".encode() in told
            Decoding(client).go_on(5)


# --- engines ------------------------------------------------------------------------------------------------------------


class HostileEngine(EnginePeer):
    """It serves model m, and waits for the test to say what it says."""

    def __init__(self, cluster: shmsched.Cluster, offer: frames.Offer = HONEST_OFFER) -> None:
        super().__init__(str(cluster.socket))
        self.told: list[Any] = []
        self.say(offer)

    def heard(self, message: Any) -> None:
        if isinstance(message, frames.Refused):
            self.told.append(message.message)
        super().heard(message)

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        def read_and_look() -> object:
            self.read()
            return condition()

        wait_until(read_and_look, what)

    def answer_by(self, status: int, token: int, messages: tuple[str, ...] = ()) -> None:
        batch = self.batches.pop(0)
        self.slots.put(batch, [status], [token])
        self.say(frames.Done(batch, messages))


OFFERS = {
    "no vocabulary": ({"vocab_size": 0}, "vocab_size is 0"),
    "a vocabulary beyond int32": ({"vocab_size": 2**31}, "vocab_size is 2147483648"),
    "no sessions": ({"max_sessions": 0}, "max_sessions is 0"),
    "sessions without end": ({"max_sessions": U32}, "max_sessions is 4294967295"),
    "sessions that hold nothing": ({"max_session_tokens": 0}, "max_session_tokens is 0"),
    "batches too small for anything": ({"max_batch_size": 1}, "max_batch_size is 1"),
    "no name": ({"model": ""}, "a name of 1 to 255 bytes"),
    "a name without end": ({"model": "x" * 60_000}, "a name of 1 to 255 bytes"),
    "a stop token that is none": ({"stop_tokens": (U32,)}, "stop_tokens has a token that is 4294967295"),
    "another vocabulary for a model": ({"model": "echo"}, "serves it with 1000"),
}


@pytest.mark.parametrize("what", OFFERS)
def test_an_offer_that_lies_is_refused_in_words(cluster: shmsched.Cluster, honest: Decoding, what: str) -> None:
    lies, words = OFFERS[what]
    with HostileEngine(cluster, HONEST_OFFER._replace(**lies)) as engine:
        engine.wait_for(lambda: engine.gone, "the engine to be let go")
        assert words in engine.told[0]


ANSWERS: dict[str, tuple[Callable[[HostileEngine], None], str]] = {
    "a status out of range": (lambda e: e.answer_by(255, 1), "status 255, which is none"),
    "no status": (lambda e: e.answer_by(0, 1), "status 0, which is none"),
    "a token outside the vocabulary": (
        lambda e: e.answer_by(StepStatus.DONE, 10),
        "token 10 is outside the vocabulary of 10",
    ),
    "a negative token": (lambda e: e.answer_by(StepStatus.DONE, -1), "token -1 is outside"),
    "messages too many": (
        lambda e: e.answer_by(StepStatus.DONE, 1, ("why",) * 1000),
        "1000 messages came for 0 failed steps",
    ),
    "messages too few": (lambda e: e.answer_by(StepStatus.FAILED, 1), "0 messages came for 1 failed steps"),
    "a message without end": (lambda e: e.answer_by(StepStatus.FAILED, 1, ("x" * 60_000,)), "failed the step"),
    "a frame that is none": (lambda e: e.say_bytes(b"\xff\xff\xff\xff"), "a frame of -1 bytes"),
    "a client's frame": (lambda e: e.say(frames.CloseSession(1)), "sent a CloseSession frame"),
    "ready again": (lambda e: e.say(frames.Ready(0.0)), "was ready already"),
    "garbage instead": (lambda e: e.say_bytes(bytes(range(1, 100))), "a frame of 16909060 bytes"),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_an_answer_that_lies_fails_its_steps_and_no_others(
    cluster: shmsched.Cluster, honest: Decoding, what: str
) -> None:
    lie, words = ANSWERS[what]
    with HostileEngine(cluster) as engine, cluster.client() as client:
        engine.say(frames.Ready(0.0))
        wait_until(lambda: "m" in client.models, "the hostile engine's model")
        with ThreadedOpening(client) as opening:
            engine.wait_for(lambda: engine.openings, "a session to be asked for")
            engine.say(frames.SlotOpened(7, 12345))
            engine.say(frames.SlotOpened(engine.openings[0][0], U64))
            engine.say(frames.SlotOpened(*engine.openings[0]))
            session = opening.session()
        future = session.submit([1])
        for batch in (0, 99, U64):
            engine.say(frames.Done(batch, ("why",)))
            engine.say(frames.BatchFailed(batch, "no"))
        engine.wait_for(lambda: engine.batches, "a batch")
        assert not future.done()
        lie(engine)
        with pytest.raises(shmsched.StepError, match=words):
            future.result(30)
        honest.go_on(5)

"""An interrupt at any line, and at any instruction, of what a call of the client runs through.

Afterwards the client goes on, or is closed and says why; the same session or a new one works; and the daemon holds nothing of the
dead call.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shmsched
from shmsched.client.generation import EngineDraft, PromptLookup

from faults.striking import Alarm, Place, Struck, Tracer
from processes.expected import VOCAB, echoes
from processes.leftovers import wait_until

# A loop that is left closes its generator as a finalizer does: what is raised there Python prints, and raises nowhere.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

DEADLINE = 10.0
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(f"echo?vocab={VOCAB}&step_us=300&max_sessions=8", max_prefill_chunk_size=16) as cluster:
        yield cluster


Scenario = Callable[[shmsched.Client, shmsched.Session], object]


def _decode(client: shmsched.Client, session: shmsched.Session) -> None:
    for _ in range(2):
        session.submit([5]).result(DEADLINE)


def _prompt(client: shmsched.Client, session: shmsched.Session) -> None:
    session.submit(list(range(40))).result(DEADLINE)


def _raw(client: shmsched.Client, session: shmsched.Session) -> None:
    for _ in range(2):
        logits = session.submit([5], sampling=None).result(DEADLINE).logits
        assert logits is not None
        logits.release()


def _open(client: shmsched.Client, session: shmsched.Session) -> None:
    with client.open_session(timeout=DEADLINE) as another:
        another.submit([5]).result(DEADLINE)


def _fork(client: shmsched.Client, session: shmsched.Session) -> None:
    session.submit([5])
    with session.fork(timeout=DEADLINE) as child:
        child.submit([6]).result(DEADLINE)


def _cancel(client: shmsched.Client, session: shmsched.Session) -> None:
    session.submit([5]).cancel()
    future = session.submit([5])
    future.add_done_callback(lambda f: None)
    future.exception(DEADLINE)


def _stream(client: shmsched.Client, session: shmsched.Session) -> None:
    stream = session.stream(PROMPT, further=200)
    stream.next(DEADLINE)
    stream.cancel()


def _generate(**how: Any) -> Scenario:
    def scenario(client: shmsched.Client, session: shmsched.Session) -> None:
        list(session.generate(PROMPT, max_new_tokens=4, **how))

    return scenario


def _leave(client: shmsched.Client, session: shmsched.Session) -> None:
    generation = session.generate(PROMPT, max_new_tokens=200)
    next(generation)
    generation.close()


def _leave_a_loop(client: shmsched.Client, session: shmsched.Session) -> None:
    for _ in session.generate(PROMPT, max_new_tokens=200, continuation=False):
        break


def _draft(client: shmsched.Client, session: shmsched.Session) -> None:
    with client.open_session(timeout=DEADLINE) as drafter:
        list(session.generate(PROMPT, max_new_tokens=4, draft=EngineDraft(drafter)))


def _whole(client: shmsched.Client, session: shmsched.Session) -> None:
    with shmsched.Client(socket=client._path) as another, another.open_session(timeout=DEADLINE) as its:
        its.submit([5]).result(DEADLINE)


SCENARIOS: dict[str, Scenario] = {
    "decode": _decode,
    "prompt": _prompt,
    "raw": _raw,
    "open": _open,
    "fork": _fork,
    "cancel": _cancel,
    "stream": _stream,
    "generate": _generate(),
    "step": _generate(continuation=False),
    "process": _generate(logits_processor=lambda tokens, row: row),
    "look-up": _generate(draft=PromptLookup()),
    "replay": _generate(on_session_lost="replay"),
    "stop": _generate(stop_tokens=range(30), continuation=True),
    "draft": _draft,
    "leave": _leave,
    "leave a loop": _leave_a_loop,
    "whole": _whole,
}


class Rig:
    """A client and its session, made anew where an interrupt has ended them."""

    def __init__(self, cluster: shmsched.Cluster) -> None:
        self.cluster = cluster
        self.clients_ended: dict[str, str] = {}
        self.sessions_ended = 0
        self._connect()

    def _connect(self) -> None:
        self.client = shmsched.Client(socket=self.cluster.socket)
        self.session = self.client.open_session(timeout=DEADLINE)

    def strike(self, scenario: Scenario, place: Place, instructions: bool, error: type[BaseException]) -> bool:
        tracer = Tracer(place, instructions=instructions, error=error)
        try:
            with tracer.following():
                scenario(self.client, self.session)
        except (Struck, Alarm):
            pass
        if tracer.struck:
            self.look_after(place)
        return tracer.struck

    def look_after(self, place: Place) -> None:
        gc.collect()
        if not self._goes_on(place):
            self.client.close()
            self._connect()
            self._works(self.session)
        self._nothing_is_left(place)

    def _goes_on(self, place: Place) -> bool:
        """Whether the client does: with the same session, or a new one. False if it is closed, which it says with the reason."""
        try:
            self._works(self.session)
            return True
        except TimeoutError as e:
            raise AssertionError(f"{place}: the session hangs") from e
        except shmsched.ClientClosed as e:
            said = str(e)
        except shmsched.ShmschedError:
            self.sessions_ended += 1
            self.session.close()
            self.session = self.client.open_session(timeout=DEADLINE)
            self._works(self.session)
            return True
        self.clients_ended[str(place)] = said
        assert "Struck" in said or "interrupt" in said, f"{place}: closed, and says no reason: {said}"
        return False

    def _works(self, session: shmsched.Session) -> None:
        tokens = session.submit([7], position=0).result(DEADLINE).tokens.tolist()
        assert tokens == echoes([7], 1)
        assert list(session.generate([8], max_new_tokens=2)) == echoes([7, 8], 2)

    def _nothing_is_left(self, place: Place) -> None:
        found: list[Any] = []

        def nothing() -> bool:
            status = self.cluster.status()
            found[:] = [(c["sessions"], c["outstanding"]) for c in status["clients"]]
            return found == [(1, 0)] and status["ledger"]["queued"] == status["ledger"]["in_flight"] == 0

        wait_until(nothing, f"{place}: one client with one session; there are {found}", DEADLINE)
        arena = self.client._channel.arena
        if arena is not None:
            arena._collect()
            assert (arena.leased, arena._allocator.held) == (0, 0), f"{place}: rows are held"
        assert self.client._channel.outstanding == 0

    def close(self) -> None:
        self.client.close()


@pytest.fixture
def rig(cluster: shmsched.Cluster, interruptible: None) -> Iterator[Rig]:
    rig = Rig(cluster)
    with warnings.catch_warnings():
        # What an interrupt has kept from whoever asked for it is closed when it is collected, which says so.
        warnings.simplefilter("ignore", ResourceWarning)
        yield rig
        rig.close()


def places(rig: Rig, scenario: Scenario, instructions: bool) -> list[Place]:
    """Those that the scenario comes to when it has been run once."""
    for _ in range(2):
        tracer = Tracer(instructions=instructions)
        with tracer.following():
            scenario(rig.client, rig.session)
    return [place for place in tracer.reached if instructions == (place[2] >= 0)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_at_some_places(rig: Rig, name: str) -> None:
    lines, instructions = places(rig, SCENARIOS[name], False), places(rig, SCENARIOS[name], True)
    for place in random.sample(lines, 6):
        rig.strike(SCENARIOS[name], place, False, random.choice([Struck, Alarm]))
    for place in random.sample(instructions, 6):
        rig.strike(SCENARIOS[name], place, True, Struck)
    assert len(rig.clients_ended) <= 1, rig.clients_ended


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("error", [Struck, Alarm])
def test_at_every_line(rig: Rig, name: str, error: type[BaseException]) -> None:
    struck = sum([rig.strike(SCENARIOS[name], place, False, error) for place in places(rig, SCENARIOS[name], False)])
    assert struck > 100
    assert len(rig.clients_ended) <= struck // 50, rig.clients_ended


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCENARIOS)
def test_at_random_instructions(rig: Rig, name: str) -> None:
    found = places(rig, SCENARIOS[name], True)
    struck = sum(
        [rig.strike(SCENARIOS[name], place, True, Struck) for place in random.sample(found, min(1000, len(found)))]
    )
    assert struck > 100
    assert len(rig.clients_ended) <= struck // 50, rig.clients_ended

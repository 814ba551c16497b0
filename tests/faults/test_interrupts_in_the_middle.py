"""An interrupt at each instruction of what a client must not do by halves, one after the other, with one client and one session.

Nothing heals in between: what any of them leaves behind is there for those that follow, and for another thread.
"""

from __future__ import annotations

import dis
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType

import pytest

import shmsched
from shmsched import dataplane
from shmsched.client.channel import Channel
from shmsched.client.client import Client
from shmsched.client.flows import driven
from shmsched.client.leases import ClientArena
from shmsched.client.opening import SessionOpener
from shmsched.client.receiver import Receiver
from shmsched.client.state import ClientState
from shmsched.client.submitting import Submitting
from shmsched.dataplane.answers import Answers
from shmsched.dataplane.client_port import ClientPort
from shmsched.dataplane.layouts import GUARD
from shmsched.futures import set_results
from shmsched.wire.inbound import Inbound
from shmsched.wire.link import Link

from faults.striking import Place, Struck, Tracer
from processes.expected import VOCAB, echoes
from processes.leftovers import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

DEADLINE = 10.0
ROWS = 64
ARENA = 4 * VOCAB * ROWS + 2 * GUARD
"""Room for one step that asks for all of its rows, and for nothing beside it."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(f"echo?vocab={VOCAB}&step_us=100&max_sessions=2", max_prefill_chunk_size=ROWS) as cluster:
        yield cluster


class Rig:
    def __init__(self, cluster: shmsched.Cluster) -> None:
        self.cluster = cluster
        self.client = shmsched.Client(socket=cluster.socket, arena_bytes=ARENA)
        self.session = self.client.open_session(timeout=DEADLINE)

    def works_elsewhere(self, where: object) -> None:
        """Another thread gets the right answer to a step of the session."""
        got: list[object] = []

        def step() -> None:
            try:
                got.append(self.session.submit([7], position=0).result(DEADLINE).tokens.tolist())
            except BaseException as e:
                got.append(e)

        thread = threading.Thread(target=step, daemon=True)
        thread.start()
        thread.join(DEADLINE)
        assert got == [echoes([7], 1)], f"{where}: another thread {'got' if got else 'hangs'} {got}"

    def works(self, where: object) -> None:
        assert self.session.submit([7], position=0).result(DEADLINE).tokens.tolist() == echoes([7], 1), where

    def strike(self, does: Callable[[Rig], None], place: Place) -> bool:
        tracer = Tracer(place, instructions=True)
        try:
            with tracer.following():
                does(self)
        except Struck:
            pass
        return tracer.struck

    def places(self, does: Callable[[Rig], None], within: list[CodeType]) -> list[Place]:
        """The instructions of these functions that it comes to."""
        for _ in range(2):
            tracer = Tracer(instructions=True)
            with tracer.following():
                does(self)
        found = []
        for code in within:
            lines = {line for _, _, line in code.co_lines() if line}
            places = [p for p in tracer.reached if p[2] >= 0 and p[0] == code.co_filename and p[1] in lines]
            assert places, f"{code.co_qualname} is not run through"
            found += places
        return found

    def nothing_is_left(self) -> None:
        found: list[object] = []

        def nothing() -> bool:
            gc.collect()
            status = self.cluster.status()
            found[:] = [(c["sessions"], c["outstanding"]) for c in status["clients"]]
            return found == [(1, 0)]

        wait_until(nothing, f"one client with one session and nothing outstanding: {found}", DEADLINE)
        self._the_whole_arena_is_free()

    def _the_whole_arena_is_free(self) -> None:
        """A client of whose arena nothing is held may have all of it at once."""
        rows = self.session.submit([1] * ROWS, position=0, sampling=None, output_rows=shmsched.OutputRows.ALL)
        logits = rows.result(DEADLINE).logits
        assert logits is not None
        logits.release()


@pytest.fixture
def rig(cluster: shmsched.Cluster, interruptible: None) -> Iterator[Rig]:
    rig = Rig(cluster)
    yield rig
    # By another thread: where a lock was left held, the test has failed, and is not to hang as well.
    closes = threading.Thread(target=rig.client.close, daemon=True)
    closes.start()
    closes.join(DEADLINE)
    assert not closes.is_alive(), "the client cannot be closed"


def decode(rig: Rig) -> None:
    rig.session.submit([5], position=1).result(DEADLINE)


def prompt(rig: Rig) -> None:
    rig.session.submit(list(range(100)), position=0).result(DEADLINE)


def raw(rig: Rig) -> None:
    logits = rig.session.submit([5], sampling=None).result(DEADLINE).logits
    assert logits is not None
    logits.release()


def cancel(rig: Rig) -> None:
    rig.session.submit([5]).cancel()


def open_another(rig: Rig) -> None:
    with rig.client.open_session(timeout=DEADLINE):
        pass


def _of(owner: type, *names: str) -> list[Callable[..., object]]:
    """Methods of the data plane: none where it is compiled, since an interrupt cannot come in them then."""
    return [] if dataplane.BUILD == "compiled" else [getattr(owner, name) for name in names]


def _codes_of(functions: list[Callable[..., object]]) -> list[CodeType]:
    if not functions:
        pytest.skip("compiled, and so in one piece for an interrupt; SHMSCHED_INTERPRETED=1 does it")
    assert all(isinstance(function, FunctionType) for function in functions)
    return [function.__code__ for function in functions if isinstance(function, FunctionType)]


PARTS: dict[str, tuple[Callable[[Rig], None], list[Callable[..., object]]]] = {
    "a step is entered": (decode, [*_of(ClientPort, "enter", "_entered"), Submitting._submit]),
    "a step's row is taken": (raw, [*_of(ClientPort, "enter"), ClientArena.take, ClientArena.place]),
    "a step leaves": (decode, [*_of(ClientPort, "send_steps", "_leave"), Link.send_packed]),
    "a prompt is entered": (prompt, [*_of(ClientPort, "enter"), Client._send, Submitting._try]),
    "a frame is read": (decode, [Inbound.arrived, Inbound.handled, Receiver._take_in, Receiver._leave]),
    "an answer is taken in": (decode, _of(Answers, "completions", "_take", "_completed", "give_out")),
    "futures are settled": (decode, [set_results]),
    "logits are leased": (raw, [*_of(Answers, "_lease", "_completed"), ClientArena.lease_to_be]),
    "a step is withdrawn": (cancel, [Channel._withdrawn, Channel.decide, Channel.under_lock]),
    "a session is opened": (
        open_another,
        [SessionOpener._ask, SessionOpener._asking, driven, Client._drive, ClientState._session_opened],
    ),
}


ROOT = Path(shmsched.__file__).parent
SOURCES = [
    *sorted((ROOT / "client").rglob("*.py")),
    *(ROOT / "dataplane" / f"{name}.py" for name in ("answers", "client_port")),
    ROOT / "futures.py",
    ROOT / "locks.py",
    ROOT / "wire" / "link.py",
]
RECOVERED = {("answers.py", "completions"), ("link.py", "_flush")}
"""Whoever calls the first gives its lock back; the second is a thread of its own, which nobody traces."""


@pytest.mark.parametrize("part", PARTS)
def test_at_every_instruction_where(rig: Rig, part: str) -> None:
    does, within = PARTS[part]
    raw(rig)
    struck = 0
    places = rig.places(does, _codes_of(within))
    for place in places:
        struck += rig.strike(does, place)
        rig.works_elsewhere(place)
    assert struck > len(places) // 2
    rig.works(part)
    rig.nothing_is_left()


@contextmanager
def struck_as_it_is_called(code: CodeType) -> Iterator[None]:
    """Raises as this function begins, once: a second strike, since Python ends a tracer that has raised."""

    def call(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code is code:
            raise Struck(f"as {code.co_qualname} begins")

    sys.setprofile(call)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_a_turn_that_two_interrupts_keep(rig: Rig) -> None:
    """The first ends a caller's wait, the second what makes up for it."""
    raw(rig)
    (within,) = _codes_of([Receiver.read_until])
    waits = [place for place in rig.places(decode, [within]) if place[1] > within.co_firstlineno + 20]
    struck = 0
    for place in waits[:: len(waits) // 10]:
        with struck_as_it_is_called(*_codes_of([Receiver._recover])):
            struck += rig.strike(decode, place)
        rig.works_elsewhere(place)
    assert struck > 3
    rig.nothing_is_left()


def test_nobody_waits_for_a_session_that_an_interrupt_ended_the_wait_for(rig: Rig) -> None:
    def waiting() -> int:
        return int(rig.cluster.status()["waiting_sessions"])

    def raises(number: int, frame: FrameType | None) -> None:
        raise Struck

    with rig.client.open_session(timeout=DEADLINE):
        before = signal.signal(signal.SIGALRM, raises)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Struck):
                rig.client.open_session(timeout=DEADLINE)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        wait_until(lambda: waiting() == 0, "nobody waits for a session", DEADLINE / 5)
    rig.nothing_is_left()


def test_an_answer_that_an_interrupt_keeps_comes_to_whoever_asks_next(rig: Rig) -> None:
    """Nothing further arrives that would bring it."""
    raw(rig)
    future = None

    def asked(rig: Rig) -> None:
        nonlocal future
        future = rig.session.submit([7], position=0)
        waited_for(rig)

    def waited_for(rig: Rig) -> None:
        assert future is not None
        future.result(DEADLINE)

    read = _of(Answers, "completions", "_take", "_read_records")
    parts = [ClientState.handle, *read, Receiver._take_in, Inbound.handled]
    struck = 0
    for place in rig.places(asked, _codes_of(parts))[::2]:
        future = rig.session.submit([7], position=0)
        struck += rig.strike(waited_for, place)
        assert future.result(DEADLINE).tokens.tolist() == echoes([7], 1), place
    assert struck > 50
    rig.nothing_is_left()


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_is_without_a_handler_where_a_lock_is_held(source: Path) -> None:
    """Python 3.11 has places that belong to no handler: at a ``try`` within a ``with``, and where a loop or a branch ends it. A tracer
    can raise there, and what was taken is never given back."""
    naked = [
        (code.co_qualname, instruction.positions.lineno if instruction.positions else None)
        for code in _codes(compile(source.read_text(), str(source), "exec"))
        for instruction in _without_a_handler(code)
        if (source.name, code.co_name) not in RECOVERED
    ]
    assert naked == []


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _without_a_handler(code: CodeType) -> Iterator[dis.Instruction]:
    """Those that do nothing, where a tracer stops all the same, between a ``with`` and what leaves it."""
    handled = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    within = False
    for instruction in dis.get_instructions(code):
        within = instruction.opname == "BEFORE_WITH" or (within and instruction.opname != "WITH_EXCEPT_START")
        covered = any(entry.start <= instruction.offset < entry.end for entry in handled)
        if within and instruction.opname == "NOP" and not covered:
            yield instruction

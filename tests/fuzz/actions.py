"""What may happen next: one peer of a world says or does something."""

from __future__ import annotations

from collections.abc import Callable

from shmsched.wire import codec, frames
from shmsched.wire.codec import pack
from shmsched.wire.framing import framed

from fuzz.choices import ByteChoices, Choices, Exhausted, one_of
from fuzz.liars import LyingClient, LyingEngine
from support.peers.connection import ControlPeer, Stranger, hello
from support.world import World

KINDS = sorted(codec._by_kind)
MOST_PEERS = 9
Action = Callable[[World, Choices], None]


def client_connects(world: World, c: Choices) -> None:
    if len(world.peers) < MOST_PEERS:
        world.clients.append(LyingClient(world.socket, world.clock.now))


def engine_connects(world: World, c: Choices) -> None:
    if len(world.peers) < MOST_PEERS:
        engine = LyingEngine(world.socket)
        world.engines.append(engine)
        if c.below(8):
            engine.offer(c)
        if c.below(8):
            engine.start(c)


def control_asks(world: World, c: Choices) -> None:
    if len(world.peers) < MOST_PEERS:
        control = ControlPeer(world.socket)
        world.others.append(control)
        for _ in range(one_of(c, (1, 1, 2, 3))):
            control.say(frames.AskStatus(one_of(c, (0, 1, 2**32 - 1))))


def stranger_connects(world: World, c: Choices) -> None:
    if len(world.peers) < MOST_PEERS:
        stranger = Stranger(world.socket)
        world.others.append(stranger)
        match c.below(5):
            case 0:
                stranger.say_bytes(c.some_bytes(40))
            case 1:
                stranger.say(hello(one_of(c, (0, 4, 255))))
            case 2:
                stranger.say(frames.Hello(1, 1, 1, 1))
            case 3:
                stranger.say_bytes(framed(pack(hello(1)))[: c.below(20)])


def someone_leaves(world: World, c: Choices) -> None:
    if world.peers and c.below(4) == 0:
        world.leave(one_of(c, world.peers))


def someone_says_anything(world: World, c: Choices) -> None:
    """A frame of any kind with any bytes in it, or no frame at all, or several, or half a one."""
    peers = world.peers if c.below(6) == 0 else world.others
    if not peers:
        return
    peer = one_of(c, peers)
    match c.below(4):
        case 0:
            peer.say_bytes(c.some_bytes(60))
        case 1:
            kind = one_of(c, [k for k in KINDS if k != STOP])
            peer.say_bytes(framed(kind.to_bytes(2, "little") + b"\0\0" + c.some_bytes(120)))
        case 2:
            peer.say_bytes(
                one_of(c, (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\0\x10\0\0" + bytes(100)))
            )
        case 3:
            peer.say_with_descriptors(frames.CloseSession(1), one_of(c, (1, 3, 16)))


STOP = codec._by_type[frames.Stop].kind
"""Whoever says it ends the daemon: it is right to."""


def someone_reads_or_does_not(world: World, c: Choices) -> None:
    """From now on."""
    if world.peers:
        peer = one_of(c, world.peers)
        peer.reads = not peer.reads


def time_passes(world: World, c: Choices) -> None:
    world.clock.advance(0.0015)


def a_client(does: Callable[[LyingClient, Choices], None]) -> Action:
    def act(world: World, c: Choices) -> None:
        if world.clients:
            does(one_of(c, world.clients), c)
        else:
            client_connects(world, c)

    act.__name__ = does.__name__
    return act


def an_engine(does: Callable[[LyingEngine, Choices], None]) -> Action:
    def act(world: World, c: Choices) -> None:
        if world.engines:
            does(one_of(c, world.engines), c)
        else:
            engine_connects(world, c)

    act.__name__ = does.__name__
    return act


SUBMIT = a_client(LyingClient.submit_any)
ANSWER = an_engine(LyingEngine.answer_any)
ANSWER_BATCH = an_engine(LyingEngine.answer_batch)
ANSWER_OPENING = an_engine(LyingEngine.answer_opening)
ACTIONS: tuple[Action, ...] = (
    client_connects, engine_connects, control_asks, stranger_connects, someone_leaves, someone_says_anything,
    someone_reads_or_does_not, time_passes,
    a_client(LyingClient.open_session), a_client(LyingClient.open_session), a_client(LyingClient.fork_session),
    a_client(LyingClient.open_session), a_client(LyingClient.close_session), a_client(LyingClient.cancel), a_client(LyingClient.halt),
    a_client(LyingClient.consumed), a_client(LyingClient.open_arena), a_client(LyingClient.scribble),
    SUBMIT, SUBMIT, SUBMIT, SUBMIT, SUBMIT, SUBMIT, SUBMIT, SUBMIT,
    an_engine(LyingEngine.offer), an_engine(LyingEngine.start), an_engine(LyingEngine.defer_all),
    an_engine(LyingEngine.scribble),
    ANSWER_OPENING, ANSWER_BATCH, ANSWER, ANSWER, ANSWER, ANSWER, ANSWER, ANSWER, ANSWER,
)  # fmt: skip


def act(world: World, c: Choices) -> None:
    """One action, and what the daemon makes of it."""
    one_of(c, ACTIONS)(world, c)
    world.turn()
    world.check()


def lying_world(**settings: int) -> World:
    return World(client_type=LyingClient, engine_type=LyingEngine, **settings)


def act_on(world: World, data: bytes) -> None:
    """Everything that the bytes decide, from an empty daemon to an empty daemon."""
    c = ByteChoices(data)
    try:
        world.begin()
        while True:
            act(world, c)
    except Exhausted:
        pass
    world.everybody_leaves()

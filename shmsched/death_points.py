"""Points at which a process can be told to die, so that tests see what the others make of it.

``SHMSCHED_DIE_AT=point`` or ``point:n`` in a process's environment has it kill itself with SIGKILL the n-th time it comes to
that point. Without the variable this module is not even imported. With it, ``arm`` puts a wrapper in the place of one
function as the process starts: the code in between knows nothing of it, and pays nothing for it.
"""

from __future__ import annotations

import functools
from enum import Enum
from typing import Any

import posix_ipc

from shmsched import dying
from shmsched.client import answers
from shmsched.client.arrivals import Arrivals
from shmsched.client.leases import ClientArena
from shmsched.client.state import Greeting
from shmsched.daemon import batch_slot, handlers
from shmsched.daemon.client_link import ClientLink
from shmsched.daemon.clients import Clients
from shmsched.daemon.connections import Connections
from shmsched.daemon.engine_link import EngineLink
from shmsched.daemon.server import Daemon
from shmsched.daemon.sessions import Sessions
from shmsched.daemon.supervisor import Supervisor
from shmsched.engine import batch_slot as engine_slot
from shmsched.engine import batch_view, host
from shmsched.memory.ring import TokenReader
from shmsched.wire import frames
from shmsched.wire.link import Link
from shmsched.wire.listener import Listener
from shmsched.wire.peer import Peer

VARIABLE = "SHMSCHED_DIE_AT"


class DeathPoint(Enum):
    """Every point, in the order of the path. The value is its name; the text says what has happened by then and what has not."""

    CLIENT_IN_HELLO = "client-in-hello"
    """Half of the client's hello is sent."""
    CLIENT_SAID_HELLO = "client-said-hello"
    """The hello is sent; nothing was read."""
    CLIENT_GREETED = "client-greeted"
    """The welcome and the descriptor of its segment are here; the segment is not mapped."""
    CLIENT_ASKED_FOR_SESSION = "client-asked-for-session"
    """A session is asked for."""
    CLIENT_WROTE_TOKENS = "client-wrote-tokens"
    """Tokens are in the ring; no frame speaks of them."""
    CLIENT_IN_SUBMIT = "client-in-submit"
    """Half of the frame that submits is sent."""
    CLIENT_SUBMITTED = "client-submitted"
    """The frame that submits is sent."""
    CLIENT_IN_FLUSH = "client-in-flush"
    """An asynchronous client has sent half of what its tasks have submitted in one turn."""
    CLIENT_HEARD_COMPLETIONS = "client-heard-completions"
    """The frame with the cursors is here; no record was read."""
    CLIENT_READ_TOKENS = "client-read-tokens"
    """Tokens of a generation were taken out of the stream; the scheduler goes on with it."""
    CLIENT_ASKED_FOR_ARENA = "client-asked-for-arena"
    """The arena for raw logits is asked for."""
    CLIENT_HEARD_OF_ARENA = "client-heard-of-arena"
    """The arena's descriptor is here; the client has not mapped it."""
    CLIENT_HOLDS_LEASES = "client-holds-leases"
    """Logits are leased; nobody has read them."""
    CLIENT_CANCELLED = "client-cancelled"
    """The scheduler was told to cancel what is outstanding."""
    CLIENT_ASKED_FOR_FORK = "client-asked-for-fork"
    """A fork is asked for."""
    CLIENT_CLOSED_SESSION = "client-closed-session"
    """The scheduler was told that a session is closed."""

    ENGINE_SAID_HELLO = "engine-said-hello"
    """The hello is sent; the offer is not."""
    ENGINE_IN_OFFER = "engine-in-offer"
    """Half of the offer is sent."""
    ENGINE_OFFERED = "engine-offered"
    """The offer is sent; nothing was read."""
    ENGINE_ATTACHED = "engine-attached"
    """Its segment is mapped; the engine has not started."""
    ENGINE_STARTED = "engine-started"
    """The engine has started; its ready is not sent."""
    ENGINE_READY = "engine-ready"
    """The scheduler was told that the engine is ready."""
    ENGINE_OPENS_SESSION = "engine-opens-session"
    """It was told to open a session, and has not begun."""
    ENGINE_OPENED_SESSION = "engine-opened-session"
    """The session is open in the engine; nobody knows."""
    ENGINE_HEARD_OF_ARENA = "engine-heard-of-arena"
    """A client's arena was announced, and is not mapped."""
    ENGINE_PULLED_BATCH = "engine-pulled-batch"
    """The batch is out of its slot; forward was not called."""
    ENGINE_IN_FORWARD = "engine-in-forward"
    """``forward`` has asked where a row of logits goes, and has written nothing into it."""
    ENGINE_WROTE_LOGITS = "engine-wrote-logits"
    """Raw logits are in the clients' arenas; nothing is in the batch's slot."""
    ENGINE_WROTE_RESULTS = "engine-wrote-results"
    """Statuses and sampled tokens are in the slot; the done message is not sent."""
    ENGINE_IN_DONE = "engine-in-done"
    """Half of the done message is sent."""
    ENGINE_SENT_DONE = "engine-sent-done"
    """The done message is sent."""
    ENGINE_GOES_ON = "engine-goes-on"
    """It has answered a batch, and comes to the one that it was to go on with."""
    ENGINE_CLOSES_SESSION = "engine-closes-session"
    """It was told to close a session, and has not begun."""

    DAEMON_SPAWNED_ENGINE = "daemon-spawned-engine"
    """The engine's process runs; the scheduler has not noted it."""
    DAEMON_ACCEPTED = "daemon-accepted"
    """A connection is accepted; nothing was read from it."""
    DAEMON_GREETS = "daemon-greets"
    """A client's hello is read; it has no memory yet."""
    DAEMON_MADE_SEGMENT = "daemon-made-segment"
    """A segment is made and its name is still there: what the next start sweeps."""
    DAEMON_IN_WELCOME = "daemon-in-welcome"
    """Half of the welcome is sent, and with it the descriptor."""
    DAEMON_ATTACHES_ENGINE = "daemon-attaches-engine"
    """An engine's offer is taken; it was not answered."""
    DAEMON_OPENS_SESSION = "daemon-opens-session"
    """A session has its slot; the engine was not told."""
    DAEMON_OPENED_SESSION = "daemon-opened-session"
    """The engine has opened it; its client was not told."""
    DAEMON_COPIED_TOKENS = "daemon-copied-tokens"
    """Tokens are out of the client's ring; their step is not queued."""
    DAEMON_QUEUED = "daemon-queued"
    """A step is queued; no batch was formed."""
    DAEMON_MADE_ARENA = "daemon-made-arena"
    """A client's arena is made; the client was not told."""
    DAEMON_WROTE_BATCH = "daemon-wrote-batch"
    """A batch is in the engine's slot; the engine was not told."""
    DAEMON_IN_WORK = "daemon-in-work"
    """Half of the frame that hands a batch over is sent."""
    DAEMON_WROTE_AHEAD = "daemon-wrote-ahead"
    """What an engine is to go on with is in its other slot; the engine was not told."""
    DAEMON_HEARD_DONE = "daemon-heard-done"
    """An engine's done is read; nothing of it is settled."""
    DAEMON_SETTLED = "daemon-settled"
    """Completions are in the client's segment; they were not announced."""
    DAEMON_STREAMED = "daemon-streamed"
    """Tokens of generations are settled; they are not in the client's segment yet, and the next steps are not queued."""
    DAEMON_IN_COMPLETIONS = "daemon-in-completions"
    """Half of the frame that announces completions is sent."""
    DAEMON_HEARD_CLOSE = "daemon-heard-close"
    """A client has closed a session; its engine was not told."""
    DAEMON_LOSES_CLIENT = "daemon-loses-client"
    """A client's connection has ended; nothing of it is cleared away."""
    DAEMON_LOSES_ENGINE = "daemon-loses-engine"
    """An engine's connection has ended; its steps are not failed."""
    DAEMON_STOPS = "daemon-stops"
    """It takes no new sessions; open ones go on."""
    DAEMON_LEAVES = "daemon-leaves"
    """Everything is settled and the engines have ended; the last words are not all sent."""


# --- where each lies ------------------------------------------------------------------------------------------------------

_SENT = functools.partial(dying.on_message, dying.sent)
_HALF = functools.partial(dying.on_message, dying.half_of_a_frame)
_TO_COME = functools.partial(dying.on_message, dying.before)

_PLACES: dict[DeathPoint, tuple[Any, str, dying.Wrap]] = {
    DeathPoint.CLIENT_IN_HELLO: (Link, "send", _HALF(frames.Hello)),
    DeathPoint.CLIENT_SAID_HELLO: (Link, "send", _SENT(frames.Hello)),
    DeathPoint.CLIENT_GREETED: (Greeting, "hear", dying.before),
    DeathPoint.CLIENT_ASKED_FOR_SESSION: (Link, "send", _SENT(frames.OpenSession)),
    DeathPoint.CLIENT_WROTE_TOKENS: (Link, "send_packed", _TO_COME(frames.Submit)),
    DeathPoint.CLIENT_IN_SUBMIT: (Link, "send_packed", _HALF(frames.Submit)),
    DeathPoint.CLIENT_SUBMITTED: (Link, "send_packed", _SENT(frames.Submit)),
    DeathPoint.CLIENT_IN_FLUSH: (Link, "flush", dying.half_of_what_waits),
    DeathPoint.CLIENT_HEARD_COMPLETIONS: (Arrivals, "completions", dying.before),
    DeathPoint.CLIENT_READ_TOKENS: (answers, "tokens_of", dying.after),
    DeathPoint.CLIENT_ASKED_FOR_ARENA: (Link, "send_packed", _SENT(frames.OpenArena)),
    DeathPoint.CLIENT_HEARD_OF_ARENA: (ClientArena, "__init__", dying.before),
    DeathPoint.CLIENT_HOLDS_LEASES: (ClientArena, "lease_to_be", dying.after),
    DeathPoint.CLIENT_CANCELLED: (Link, "send_packed", _SENT(frames.Cancel)),
    DeathPoint.CLIENT_ASKED_FOR_FORK: (Link, "send", _SENT(frames.ForkSession)),
    DeathPoint.CLIENT_CLOSED_SESSION: (Link, "send", _SENT(frames.CloseSession)),
    DeathPoint.ENGINE_SAID_HELLO: (Link, "send", _SENT(frames.Hello)),
    DeathPoint.ENGINE_IN_OFFER: (Link, "send", _HALF(frames.Offer)),
    DeathPoint.ENGINE_OFFERED: (Link, "send", _SENT(frames.Offer)),
    DeathPoint.ENGINE_ATTACHED: (host.EngineHost, "_attach", dying.after),
    DeathPoint.ENGINE_STARTED: (Link, "send", _TO_COME(frames.Ready)),
    DeathPoint.ENGINE_READY: (Link, "send", _SENT(frames.Ready)),
    DeathPoint.ENGINE_OPENS_SESSION: (host.EngineHost, "_open", dying.before),
    DeathPoint.ENGINE_OPENED_SESSION: (Link, "send", _TO_COME(frames.SlotOpened)),
    DeathPoint.ENGINE_HEARD_OF_ARENA: (host.EngineHost, "_handle", _TO_COME(frames.AttachArena)),
    DeathPoint.ENGINE_PULLED_BATCH: (engine_slot.BatchSlot, "pull", dying.after),
    DeathPoint.ENGINE_IN_FORWARD: (batch_view.BatchView, "_row", dying.before),
    DeathPoint.ENGINE_WROTE_LOGITS: (engine_slot.BatchSlot, "write", dying.before),
    DeathPoint.ENGINE_WROTE_RESULTS: (Link, "send_packed", _TO_COME(frames.Done)),
    DeathPoint.ENGINE_IN_DONE: (Link, "send_packed", _HALF(frames.Done)),
    DeathPoint.ENGINE_SENT_DONE: (Link, "send_packed", _SENT(frames.Done)),
    DeathPoint.ENGINE_GOES_ON: (host.EngineHost, "_follow", dying.before),
    DeathPoint.ENGINE_CLOSES_SESSION: (host.EngineHost, "_close", dying.before),
    DeathPoint.DAEMON_SPAWNED_ENGINE: (Supervisor, "_spawn", dying.after),
    DeathPoint.DAEMON_ACCEPTED: (Listener, "accept", dying.on_accept),
    DeathPoint.DAEMON_GREETS: (Clients, "welcome", dying.before),
    DeathPoint.DAEMON_MADE_SEGMENT: (posix_ipc, "unlink_shared_memory", dying.before),
    DeathPoint.DAEMON_IN_WELCOME: (Peer, "send", _HALF(frames.Welcome)),
    DeathPoint.DAEMON_ATTACHES_ENGINE: (Peer, "send", _TO_COME(frames.Attached)),
    DeathPoint.DAEMON_OPENS_SESSION: (Peer, "send", _TO_COME(frames.OpenSlot)),
    DeathPoint.DAEMON_OPENED_SESSION: (Sessions, "opened", dying.before),
    DeathPoint.DAEMON_COPIED_TOKENS: (TokenReader, "take", dying.after),
    DeathPoint.DAEMON_QUEUED: (Daemon, "take_in", dying.after),
    DeathPoint.DAEMON_MADE_ARENA: (Clients, "_arena_made", dying.before),
    DeathPoint.DAEMON_WROTE_BATCH: (batch_slot.BatchSlot, "write", dying.after),
    DeathPoint.DAEMON_IN_WORK: (Peer, "send", _HALF(frames.Work)),
    DeathPoint.DAEMON_WROTE_AHEAD: (batch_slot.BatchSlot, "write_following", dying.after),
    DeathPoint.DAEMON_HEARD_DONE: (EngineLink, "done", dying.before),
    DeathPoint.DAEMON_SETTLED: (ClientLink, "_publish", dying.after),
    DeathPoint.DAEMON_STREAMED: (ClientLink, "stream", dying.after),
    DeathPoint.DAEMON_IN_COMPLETIONS: (Peer, "send", _HALF(frames.Completions)),
    DeathPoint.DAEMON_HEARD_CLOSE: (Sessions, "close_for", dying.before),
    DeathPoint.DAEMON_LOSES_CLIENT: (handlers.ClientHandler, "lost", dying.before),
    DeathPoint.DAEMON_LOSES_ENGINE: (handlers.EngineHandler, "lost", dying.before),
    DeathPoint.DAEMON_STOPS: (Daemon, "stop", dying.after),
    DeathPoint.DAEMON_LEAVES: (Connections, "close", dying.before),
}


def arm(order: str) -> None:
    """Have this process die at ``point`` or ``point:n``. Raises ValueError that lists the points."""
    name, _, count = order.partition(":")
    known = {point.value: point for point in DeathPoint}
    if name not in known or not (count or "1").isdecimal() or int(count or 1) < 1:
        raise ValueError(
            f"{VARIABLE} is {order!r}; it must be point or point:n, n from 1 on. Points: {', '.join(known)}"
        )
    owner, attribute, wrap = _PLACES[known[name]]
    left = int(count or 1)

    def is_time() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    setattr(owner, attribute, wrap(getattr(owner, attribute), is_time))

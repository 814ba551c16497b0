"""Every open connection: reading frames for its handler, writing what was queued, ending it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from shmsched import failpoints
from shmsched.daemon.loop import READ, WRITE, EventLoop, Timer, contained
from shmsched.errors import ErrorCode, ProtocolError, ShmschedError
from shmsched.limits import lacking
from shmsched.saying import counted, say, say_trace
from shmsched.wire import frames
from shmsched.wire.credentials import refuse_other_users
from shmsched.wire.listener import Listener
from shmsched.wire.peer import Peer

HELLO_TIMEOUT_S = 10.0
ACCEPT_PAUSE_S = 0.1
RESERVED = 8
"""Places beyond the most for those who ask for status or a stop."""
REFUSE_AFTER_S = 1.0
"""How long those who connect wait for a descriptor before they are told that there is none."""
_READS = 256
_REFUSALS = 16
STALL_S = 1.0
"""How long a peer may have more waiting for it than its bound."""


class Handler(Protocol):
    """What a connection is for, once its hello has said so."""

    def frame_received(self, message: Any) -> None:
        """One frame. Raises ProtocolError, which ends the connection."""

    def connection_lost(self, why: str) -> None:
        """The connection has ended."""


class Connection:
    """One peer and its handler."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.handler: Handler | None = None
        self.open = True
        self.writing = False
        self.paused = False
        """Nothing is read from it for now."""
        self.unhandled: list[Any] = []
        """What had been read when it was paused."""
        self.hello_timer: Timer | None = None
        self.stall_timer: Timer | None = None


class Connections:
    """Accepts, reads, flushes and drops. What a peer does wrong costs that peer its connection and nobody anything else."""

    def __init__(self, loop: EventLoop, listener: Listener, most: int) -> None:
        self._loop = loop
        self._listener = listener
        self._most = most
        self.greet: Callable[[Connection, frames.Hello], Handler]
        """Says what a new connection is for. Set before the loop turns."""
        self._all: set[Connection] = set()
        self._pending: set[Connection] = set()
        self._silent: dict[Connection, None] = {}
        """Those that have not said hello yet, the oldest first."""
        self._told_of_pause = False
        self._paused_at = 0.0
        """Since when there has been no descriptor for those who connect; 0 where there is."""
        self._spare = _spare_descriptor()
        """Given up for a moment to tell somebody that there is no other one."""
        self._blamed: dict[Connection, str] = {}
        """Those that end with this turn, and why."""
        self._accepting = True
        loop.watch(listener.sock.fileno(), READ, self._accept)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def unsent(self) -> bool:
        """Something is still waiting to be written to some peer."""
        return any(c.peer.outbound_bytes for c in self._all)

    def drop(self, connection: Connection, why: str, code: ErrorCode | None = None) -> None:
        """End a connection, saying why if ``code`` is given and the peer still reads. Idempotent."""
        if not connection.open:
            return
        connection.open = False
        self._loop.unwatch(connection.peer.sock.fileno())
        if code is not None:
            connection.peer.send(frames.Refused(code, why))
            try:
                connection.peer.flush()
            except OSError:
                pass
        connection.peer.close()
        self._all.discard(connection)
        self._pending.discard(connection)
        self._silent.pop(connection, None)
        if connection.hello_timer is not None:
            connection.hello_timer.cancel()
        handler, connection.handler = connection.handler, None
        # It refers back to the connection: what a dead peer had must go now, and not whenever cycles are collected.
        connection.peer.on_pending = lambda: None
        if handler is not None:
            handler.connection_lost(why)

    def blame(self, connection: Connection, fault: Exception) -> None:
        """A fault of ours was found in what is done for this peer alone: its connection ends with this turn, and nobody else's.

        Not at once: whoever finds it may be in the middle of the same thing for others.
        """
        say_trace(fault)
        self._blamed.setdefault(connection, _our_fault(fault))

    def excuse(self, seconds: float) -> None:
        """We did not run: who did not read may have been stopped with us, and may be so for that long yet."""
        for connection in self._all:
            if connection.peer.behind_since:
                connection.peer.behind_since += seconds

    def pause(self, connection: Connection) -> None:
        """Read nothing more from this peer until ``resume``. Its end is still seen."""
        connection.paused = True
        self._set_events(connection)

    def resume(self, connection: Connection) -> None:
        connection.paused = False
        if connection.open:
            self._set_events(connection)
            self._go_on(connection)

    def read_all(self, connection: Connection) -> None:
        """Handle what has arrived by now. No more reads than its socket holds: a peer may write for ever."""
        for _ in range(_READS):
            if not connection.open or not self._receive(connection):
                break

    def read_and_drop(self, connection: Connection, why: str) -> None:
        """The peer's process is dead: handle what it had still sent, then end the connection."""
        self.read_all(connection)
        self.drop(connection, why)

    def flush(self) -> None:
        """Write what was queued in this turn. A peer that is gone, or that does not read, is dropped."""
        while self._blamed:
            with contained():
                self.drop(*self._blamed.popitem(), ErrorCode.PROTOCOL)
        pending = self._pending
        while pending:
            with contained():
                self._flush(pending.pop())

    def close(self) -> None:
        failpoints.hit("daemon.leaving")
        if self._accepting:
            self._loop.unwatch(self._listener.sock.fileno())
        if self._spare >= 0:
            os.close(self._spare)
        for connection in list(self._all):
            with contained():
                self.drop(connection, "the scheduler has ended")

    def _accept(self, _: int) -> None:
        # A bounded number each time: a flood of connections must not keep the loop from its peers.
        for _ in range(16):
            try:
                sock = self._listener.accept()
            except OSError as e:
                self._pause_accepting(e)
                return
            if sock is None:
                return
            failpoints.hit("daemon.connection.accepted")
            self._told_of_pause = False
            self._paused_at = 0.0
            peer = Peer(sock)
            connection = Connection(peer)
            peer.on_pending = partial(self._pending.add, connection)
            self._all.add(connection)
            self._loop.watch(sock.fileno(), READ, partial(self._ready, connection))
            try:
                refuse_other_users(peer.uid)
            except ProtocolError as e:
                self.drop(connection, str(e), ErrorCode.PROTOCOL)
                continue
            self._silent[connection] = None
            if len(self._all) > self._most + RESERVED:
                # Whoever says nothing gives way to whoever may have something to say.
                oldest = next(iter(self._silent))
                self._refuse(oldest)
                if oldest is connection:
                    continue
            connection.hello_timer = self._loop.call_later(HELLO_TIMEOUT_S, lambda c=connection: self._expect_hello(c))  # type: ignore[misc]

    def _refuse(self, connection: Connection) -> None:
        self.drop(
            connection,
            f"{counted(self._most, 'connection is', 'connections are')} open, the most that are allowed",
            ErrorCode.FULL,
        )

    def _is_let_in(self, connection: Connection, hello: frames.Hello) -> bool:
        """Beyond the most, only those who ask for status or a stop are. Those that have said nothing give way to others."""
        while hello.role != frames.Role.CONTROL and len(self._all) > self._most:
            oldest = next(iter(self._silent), connection)
            self._refuse(oldest)
            if oldest is connection:
                return False
        return True

    def _pause_accepting(self, cause: OSError) -> None:
        """No descriptors are left: what waits in the backlog would wake the loop again and again to no avail."""
        if not self._told_of_pause:
            self._told_of_pause = True
            say(
                f"shmsched: cannot accept connections for now: {cause.strerror}; {len(self._all)} are open. `ulimit -n` says how"
                " many descriptors there may be"
            )
        now = self._loop.clock.now()
        if not self._paused_at:
            self._paused_at = now
        elif now >= self._paused_at + REFUSE_AFTER_S:
            self._refuse_waiting(cause)
        self._accepting = False
        self._loop.unwatch(self._listener.sock.fileno())
        self._loop.call_at(now + ACCEPT_PAUSE_S, self._accept_again)

    def _accept_again(self) -> None:
        try:
            self._loop.watch(self._listener.sock.fileno(), READ, self._accept)
            self._accepting = True
        except OSError:
            # The kernel has no memory for it now.
            self._loop.call_later(ACCEPT_PAUSE_S, self._accept_again)

    def listen_anew(self) -> None:
        """The listener's socket is another one, under its old number."""
        if self._accepting:
            self._loop.watch(self._listener.sock.fileno(), READ, self._accept)
            self._accept(0)

    def _refuse_waiting(self, cause: OSError) -> None:
        """Tell those in the backlog why they are not heard."""
        message = f"the scheduler has no descriptor for another connection; {len(self._all)} are open. {lacking(cause)}"
        for _ in range(_REFUSALS):
            if self._spare < 0:
                self._spare = _spare_descriptor()
                if self._spare < 0:
                    return
            os.close(self._spare)
            self._spare = -1
            try:
                sock = self._listener.accept()
            except OSError:
                return
            if sock is None:
                break
            peer = Peer(sock)
            peer.send(frames.Refused(ErrorCode.SYSTEM_LIMIT, message))
            try:
                peer.flush()
            except OSError:
                pass
            peer.close()
        self._spare = _spare_descriptor()

    def _expect_hello(self, connection: Connection) -> None:
        if connection.handler is None:
            self.drop(connection, f"no hello came within {HELLO_TIMEOUT_S:g} s", ErrorCode.PROTOCOL)

    def _ready(self, connection: Connection, events: int) -> None:
        if events & WRITE:
            self._pending.add(connection)
            if events == WRITE:
                return
        self._receive(connection)

    def _receive(self, connection: Connection) -> bool:
        """Read once and handle what came. False if nothing had arrived, or the connection has ended."""
        try:
            arrived = connection.peer.read()
            if arrived is not None:
                return self._handle(connection, arrived)
            self.drop(connection, "the peer closed the connection")
        except Exception as e:
            self._fault(connection, e)
        return False

    def _go_on(self, connection: Connection) -> None:
        unhandled, connection.unhandled = connection.unhandled, []
        try:
            self._handle(connection, unhandled)
        except Exception as e:
            self._fault(connection, e)

    def _handle(self, connection: Connection, arrived: list[Any]) -> bool:
        peer = connection.peer
        for i, message in enumerate(arrived):
            if connection.paused:
                connection.unhandled += arrived[i:]
                break
            if connection.handler is None:
                hello = _checked(message)
                self._silent.pop(connection, None)
                if not self._is_let_in(connection, hello):
                    return False
                connection.handler = self.greet(connection, hello)
                if connection.hello_timer is not None:
                    connection.hello_timer.cancel()
            else:
                connection.handler.frame_received(message)
            if not connection.open:
                return False
            if peer.outbound_bytes and peer.flooded:
                self._pending.add(connection)
                return False
        return bool(arrived)

    def _fault(self, connection: Connection, fault: Exception) -> None:
        """What goes wrong ends this connection."""
        if isinstance(fault, ProtocolError):
            self.drop(connection, str(fault), ErrorCode.PROTOCOL)
        elif isinstance(fault, ShmschedError):
            self.drop(connection, str(fault), ErrorCode.of(fault))
        else:
            # What this peer's frame found must not take everybody else down with it.
            say_trace(fault)
            self.drop(connection, _our_fault(fault), ErrorCode.PROTOCOL)

    def _look_again(self, connection: Connection) -> None:
        connection.stall_timer = None
        if connection.open:
            self._pending.add(connection)

    def _flush(self, connection: Connection) -> None:
        if not connection.open:
            return
        try:
            written = connection.peer.flush()
        except OSError as e:
            self.drop(connection, f"the peer is gone: {e.strerror}")
            return
        if not written and self._does_not_read(connection):
            return
        if written == connection.writing:
            connection.writing = not written
            connection.peer.behind_since = 0.0 if written else self._loop.clock.now()
            self._set_events(connection)

    def _does_not_read(self, connection: Connection) -> bool:
        """Something is left that its socket did not take: whether that was too much, for too long."""
        peer = connection.peer
        if peer.flooded or (peer.overfull and self._loop.clock.now() >= peer.behind_since + STALL_S):
            self.drop(connection, f"the peer does not read: {peer.outbound_bytes} bytes wait for it")
            return True
        if peer.overfull and connection.stall_timer is None:
            # One that reads may get much at once, when an engine with thousands of its sessions dies, say.
            connection.stall_timer = self._loop.call_later(STALL_S, lambda: self._look_again(connection))
        return False

    def _set_events(self, connection: Connection) -> None:
        events = (0 if connection.paused else READ) | (WRITE if connection.writing else 0)
        self._loop.change(connection.peer.sock.fileno(), events)


def _spare_descriptor() -> int:
    try:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _our_fault(fault: Exception) -> str:
    return f"the scheduler failed on this connection: {type(fault).__name__}: {fault}"


def _checked(message: Any) -> frames.Hello:
    """The hello that a connection must begin with. Raises ProtocolError."""
    if not isinstance(message, frames.Hello) or message.magic != frames.MAGIC:
        raise ProtocolError("the first frame is not a shmsched hello")
    if message.major != frames.MAJOR:
        raise ProtocolError(
            f"the peer speaks protocol {message.major}.{message.minor}; this daemon speaks {frames.MAJOR}.{frames.MINOR}."
            " Run the same major version of shmsched on both sides"
        )
    return message

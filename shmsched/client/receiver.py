"""Who reads the connection: a thread, or in its stead the caller that waits for an answer.

An answer that has to pass from a receiving thread to the one that waits for it costs two thread switches and the wait for the
interpreter's lock; up to its switch interval of 5 ms if the caller is busy. So a caller that waits for a future reads the
connection itself, and settles whatever arrives with it. The thread then stands aside, and looks every few milliseconds whether
callers still come; what is awaited by other means (callbacks, ``wait``, streams) it reads itself.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from typing import Any

from shmsched.client.state import ClientState, MakeSession
from shmsched.client.waker import Waker
from shmsched.dataplane.submission import PendingResult
from shmsched.errors import ClientClosed, Full, ShmschedError
from shmsched.futures import LightFuture
from shmsched.locks import Bell, runs
from shmsched.saying import say_trace
from shmsched.wire.inbound import AT_ONCE
from shmsched.wire.link import Link

PARK_S = 0.005
"""How long the thread stands aside before it looks again. What only it would read or send waits so long at most."""
LONG_PARK_S = 0.25
"""The same while a caller waits for something slow, which wakes it as it leaves, unless interrupts keep it from that."""


class Receiver(threading.Thread):
    """Reads until the connection is over, and ends everything with the reason."""

    def __init__(self, link: Link, state: ClientState, make_session: MakeSession) -> None:
        super().__init__(name="shmsched-receiver", daemon=True)
        self._link = link
        self._state = state
        self._channel = state.channel
        self._make_session = make_session
        self._turn: dict[str, int] = {}
        """Under "turn" the thread that reads and handles, if any. Taking it with ``setdefault`` says in one instruction who has
        it: an interrupt right after a lock was acquired would leave it acquired."""
        self._reading = False
        """A caller reads."""
        self._read = False
        """A caller has read since the thread last looked."""
        self._followers = 0
        """Callers that found another one reading, and wait for that one, or the thread, to settle their futures."""
        self._aside = False
        """The thread stands aside, and will flush what is left for later when it looks again."""
        self._parked_for_long = False
        self._look = Bell()
        self._handler = 0
        """The thread that handles frames now, and runs callbacks."""
        self._ended = False
        self._left = False
        """The thread has nothing left to do."""
        self._poll = select.poll()
        """The callers' own: a poll object is for one thread at a time."""
        self._poll.register(link.fileno(), select.POLLIN)
        self._poll_of_thread = select.poll()
        self._poll_of_thread.register(link.fileno(), select.POLLIN)
        self._waker: Waker | None = Waker()
        self._poll.register(self._waker, select.POLLIN)
        self._poll_of_thread.register(self._waker, select.POLLIN)
        self._answers = 0
        """How many futures the caller that read last has settled and not submitted anew for."""

    # --- the thread -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while not self._left:
            try:
                self._go_on()
            except BaseException as e:
                self._struck(e)

    def _go_on(self) -> None:
        if self._ended:
            self._wind_up()
        elif self._reading or self._read:
            self._stand_aside()
        else:
            events = [] if self._link.inbound.waits else self._poll_of_thread.poll()
            if not self._reading and self._take_turn():
                if any(fd != self._link.fileno() for fd, _ in events):
                    self._woken()
                self._take_in()
                self._turn.clear()

    def _struck(self, error: BaseException) -> None:
        """Somebody has raised something in this thread, a callback of a future has, or the fault is ours. Nobody may wait for this
        connection from now on; and should it happen once more, nobody may either."""
        try:
            what = f"the client's receiver was ended by {type(error).__name__}: {error}"
            self._recover()
            self._end(error if isinstance(error, ShmschedError) else ClientClosed(f"{what}. Make a new client"))
            if not isinstance(error, ShmschedError):
                say_trace()
        except BaseException:
            if not self._ended:
                self._struck(error)

    def _wind_up(self) -> None:
        if self._state.closed:
            self._link.close()
        while not self._take_turn():
            time.sleep(PARK_S)
            self._reclaim_turn()
        # A caller that still waited has gone, and no other one will. The client is kept by nothing of ours from here on.
        self._waker = None
        self.__dict__.pop("_make_session", None)
        self._left = True

    def _take_turn(self) -> bool:
        me = threading.get_ident()
        return self._turn.setdefault("turn", me) == me

    def _reclaim_turn(self) -> None:
        """From a caller that interrupts have kept from giving it back: one that does not read."""
        holder = self._turn.get("turn")
        if holder is not None and holder != self.ident and not runs(holder, Receiver.read_until.__code__):
            self._reading = False
            self._turn.clear()

    def _recover(self) -> None:
        """After an exception: keep nothing that others wait for."""
        me = threading.get_ident()
        self._channel.interrupted()
        if self._handler == me:
            self._handler = 0
        if self._turn.get("turn") == me:
            self._leave()
            self._look.ring()

    def _stand_aside(self) -> None:
        # The one that reads has done so since the last look: it waits for something slow, and wakes the thread as it leaves.
        long = self._reading and not self._read
        self._read = False
        if long:
            self._parked_for_long = True
            # It may have left between the two, and then did not see that it had to wake anybody.
            long = self._reading
        self._aside = True
        woken = self._look.wait(LONG_PARK_S if long else PARK_S)
        self._aside = False
        self._parked_for_long = False
        if long and not woken:
            self._reclaim_turn()
        # Whatever was left for later before it said that it is back.
        try:
            self._channel.flush()
        except ShmschedError:
            # The end of the stream says so too.
            pass

    def wake(self) -> None:
        """Have the thread look now."""
        self._look.ring()

    def withdraw(self, reply: PendingResult) -> bool:
        return self._channel.withdraw(reply)

    def poke(self) -> None:
        """Have a caller that reads look whether its future is settled: another thread may have cancelled it."""
        if self._reading:
            self.rouse()

    def rouse(self) -> None:
        """Have whoever reads look around. Takes no lock."""
        waker = self._waker
        if waker is not None:
            waker.wake()

    def _woken(self) -> None:
        if self._waker is not None:
            self._waker.rest()
        self._state.close_dropped()

    # --- a caller -------------------------------------------------------------------------------------------------------

    def wait_for(self, future: LightFuture[Any], deadline: float | None) -> bool:
        """Wait until it is settled, reading in the thread's stead if nobody else does. False if ``deadline`` came first."""
        if not self.read_until(future.done, deadline) or not future.done():
            return future.wait_until_done(deadline)
        return True

    def read_until(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        """Read until ``ready()``, or until ``deadline`` in seconds of ``time.monotonic()``. False, at once, if another one reads.

        Raises Full in a future's callback, which would wait for itself.
        """
        if self._handler:
            self.refuse_in_callback("wait for another answer")
        if self._channel.lock.mine:
            # Interrupts have kept an earlier call from giving it back.
            self._channel.interrupted()
        try:
            if not self._take_turn():
                self._followers += 1
                return False
            self._reading = True
            while not ready() and not self._ended:
                self._channel.flush()
                if self._link.inbound.waits:
                    self._take_in()
                    continue
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                events = self._poll.poll(None if left is None else 1000 * left)
                if len(events) > 1 or (events and events[0][0] != self._link.fileno()):
                    self._woken()
                elif events:
                    self._take_in()
            self._leave()
        except ShmschedError:
            # It cannot be flushed: the daemon is gone. What it had still said is read next, by the thread.
            self._recover()
        except BaseException:
            self._recover()
            raise
        return True

    def _leave(self) -> None:
        """The caller's turn is over."""
        followers, self._followers = self._followers, 0
        self._read = not followers
        self._reading = False
        self._turn.clear()
        if followers or self._parked_for_long or self._ended:
            self._look.ring()

    def expects_more(self) -> bool:
        """Whether what has just been submitted may wait for what follows: other sessions were answered together with this one,
        and are likely to come back as well. It is sent with the last of them, when the caller waits, or after PARK_S.

        Only where the thread will flush within PARK_S: it says that it is back before it flushes, and a caller's long wait may
        keep it aside for longer.
        """
        if self._answers > 1 and self._aside and not (self._reading and self._parked_for_long):
            self._answers -= 1
            return True
        return False

    def refuse_in_callback(self, what: str) -> None:
        """Raises Full in a future's callback: what it would wait for comes to the very thread that runs it."""
        if self.handles_here():
            raise Full(f"a future's callback cannot {what}: the answer comes to the thread that runs it; use another")

    def handles_here(self) -> bool:
        """Whether this very thread handles frames, and waits in vain for whatever they bring."""
        me = threading.get_ident()
        if me != self._handler:
            return False
        if not runs(me, Receiver._take_in.__code__):
            # Interrupts have kept it from saying that it is done.
            self._handler = 0
            return False
        return True

    # --- both -----------------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Handle what has arrived. Whoever calls has the turn. What an interrupt keeps from it is still there for whoever comes
        next; a frame may be handled twice."""
        self._handler = threading.get_ident()
        pending = self._channel.pending
        outstanding = len(pending)
        inbound, handle = self._link.inbound, self._state.handle
        try:
            arrived = inbound.arrived(AT_ONCE)
            if arrived is None:
                self._end(self._state.end_of_stream())
            else:
                for message in arrived:
                    handle(message, self._make_session)
                    inbound.handled()
        except ShmschedError as e:
            self._end(e)
        self._handler = 0
        self._answers = outstanding - len(pending)

    def _end(self, error: ShmschedError) -> None:
        self._state.end(error)
        self._ended = True
        self._look.ring()

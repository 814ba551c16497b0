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

from shmsched.client.interrupts import Deferred
from shmsched.client.replies import Reply
from shmsched.client.state import ClientState, MakeSession
from shmsched.client.waker import Waker
from shmsched.errors import ClientClosed, Full, ShmschedError
from shmsched.saying import say_trace
from shmsched.wire.link import Link

PARK_S = 0.005
"""How long the thread stands aside before it looks again. What only it would read or send waits so long at most."""


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
        self._interrupts = Deferred()
        self._reading = False
        """A caller reads."""
        self._read = False
        """A caller has read since the thread last looked."""
        self._followers = 0
        """Callers that found another one reading, and wait for that one, or the thread, to settle their futures."""
        self._aside = False
        """The thread stands aside, and will flush what is left for later when it looks again."""
        self._parked_for_long = False
        self._look = threading.Event()
        self._handler = 0
        """The thread that handles frames now, and runs callbacks."""
        self._ended = False
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
        while not self._ended:
            if self._reading or self._read:
                self._stand_aside()
            elif (events := self._poll_of_thread.poll()) and not self._reading and self._take_turn():
                try:
                    if any(fd != self._link.fileno() for fd, _ in events):
                        self._woken()
                    self._take_in()
                finally:
                    self._turn.clear()
        if self._state.closed:
            self._link.close()
        while not self._take_turn():
            time.sleep(PARK_S)
        # A caller that still waited has gone, and no other one will. The client is kept by nothing of ours from here on.
        self._waker = None
        del self._make_session

    def _take_turn(self) -> bool:
        me = threading.get_ident()
        return self._turn.setdefault("turn", me) == me

    def _stand_aside(self) -> None:
        # The one that reads has done so since the last look: it waits for something slow, and wakes the thread as it leaves.
        long = self._reading and not self._read
        self._read = False
        if long:
            self._parked_for_long = True
            # It may have left between the two, and then did not see that it had to wake anybody.
            long = self._reading
        self._aside = True
        self._look.wait(None if long else PARK_S)
        self._aside = False
        self._look.clear()
        self._parked_for_long = False
        # Whatever was left for later before it said that it is back.
        try:
            self._channel.flush()
        except ShmschedError:
            # The end of the stream says so too.
            pass

    def wake(self) -> None:
        """Have the thread look now."""
        self._look.set()

    def withdraw(self, reply: Reply) -> bool:
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

    def read_until(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        """Read until ``ready()``, or until ``deadline`` in seconds of ``time.monotonic()``. False, at once, if another one reads.

        Raises Full in a future's callback, which would wait for itself.
        """
        if self._handler:
            self.refuse_in_callback("wait for another answer")
        try:
            if not self._take_turn():
                self._followers += 1
                return False
            self._reading = True
            while not ready() and not self._ended:
                self._channel.flush()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                events = self._poll.poll(None if left is None else 1000 * left)
                if len(events) > 1 or (events and events[0][0] != self._link.fileno()):
                    self._woken()
                elif events:
                    self._take_in()
        except ShmschedError:
            # It cannot be flushed: the daemon is gone. What it had still said is read next, by the thread.
            pass
        finally:
            if self._turn.get("turn") == threading.get_ident():
                self._leave()
        return True

    def _leave(self) -> None:
        """The caller's turn is over."""
        followers, self._followers = self._followers, 0
        self._read = not followers
        self._reading = False
        self._turn.clear()
        if followers or self._parked_for_long or self._ended:
            self._look.set()

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
        return threading.get_ident() == self._handler

    # --- both -----------------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Handle what has arrived. Whoever calls has the turn."""
        with self._interrupts:
            self._handle_arrived()

    def _handle_arrived(self) -> None:
        self._handler = threading.get_ident()
        outstanding = self._channel.outstanding
        try:
            arrived = self._link.receive_ready()
            if arrived is None:
                self._end(self._state.end_of_stream())
                return
            for message in arrived:
                self._state.handle(message, self._make_session)
        except ShmschedError as e:
            self._end(e)
        except BaseException as e:
            # A second interrupt in the middle of this leaves things half done; a callback may have raised SystemExit; or the
            # fault is ours. Nobody may wait for this connection from now on.
            what = f"the client's receiver was ended by {type(e).__name__}: {e}"
            self._end(ClientClosed(f"{what}. Make a new client"))
            if not isinstance(e, Exception) and threading.current_thread() is not self:
                raise
            say_trace()
        finally:
            self._handler = 0
            self._answers = outstanding - self._channel.outstanding

    def _end(self, error: ShmschedError) -> None:
        self._ended = True
        self._state.end(error)
        self._look.set()

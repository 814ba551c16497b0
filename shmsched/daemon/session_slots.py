"""An engine's slots, and which session has each."""

from __future__ import annotations

from heapq import heappop, heappush

from shmsched import failpoints
from shmsched.daemon.client_link import ClientLink
from shmsched.daemon.clock import Clock
from shmsched.dataplane.session import Session, SessionState


class SessionSlots:
    """Slots are dense from 0 on, and the lowest free one is taken.

    One that is given back is free at once: what the engine gets for it next comes after the word that it is closed. Only where
    the engine has not answered its opening yet, the slot waits for that answer. Else a client that opens and closes in a loop
    would pile up frames for an engine that is busy.
    """

    def __init__(self, most: int, clock: Clock) -> None:
        self._most = most
        self._clock = clock
        self.sessions: dict[int, Session] = {}
        self.holders: dict[ClientLink, int] = {}
        """How many of the slots each client has."""
        self.openings: dict[int, float] = {}
        """Slots whose opening the engine has not answered, and when it was asked."""
        self._closed_early: dict[int, int] = {}
        """Slots whose session ended before the engine had answered its opening, with that session's number."""
        self._freed: list[int] = []
        self._next = 0
        """Slots from here on were never used; those before it are in use, or freed."""

    @property
    def has_room(self) -> bool:
        return bool(self._freed) or self._next < self._most

    def take(self, session: Session) -> int:
        """The slot that the session is being opened in from now on."""
        if self._freed:
            session.slot = heappop(self._freed)
        else:
            session.slot, self._next = self._next, self._next + 1
        session.state = SessionState.OPENING
        self.sessions[session.slot] = session
        self.holders[session.client] = self.holders.get(session.client, 0) + 1
        self.openings[session.slot] = self._clock.now()
        failpoints.hit("daemon.session.placed")
        return session.slot

    def give_back(self, session: Session, refused: bool) -> None:
        """The session has ended; ``refused``: the engine would not open it."""
        del self.sessions[session.slot]
        self.holders[session.client] -= 1
        if not self.holders[session.client]:
            del self.holders[session.client]
        if session.state is SessionState.OPENING and not refused:
            self._closed_early[session.slot] = session.number
        else:
            heappush(self._freed, session.slot)

    def answered(self, slot: int, number: int) -> tuple[Session | None, bool]:
        """The engine has opened, or refused, session ``number``. Returns it, unless it has ended meanwhile, and whether this was
        asked of the engine at all."""
        session = self.sessions.get(slot)
        asked = session.number if session is not None else self._closed_early.get(slot)
        was_owed = number == asked and self.openings.pop(slot, None) is not None
        if self._closed_early.get(slot) == number:
            del self._closed_early[slot]
            heappush(self._freed, slot)
            return None, was_owed
        if session is None or session.number != number or session.state is not SessionState.OPENING:
            return None, was_owed
        return session, was_owed

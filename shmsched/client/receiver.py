"""The thread that receives what the daemon says, and settles futures with it."""

from __future__ import annotations

import threading
import traceback

from shmsched.client.state import ClientState, MakeSession
from shmsched.errors import ClientClosed, ShmschedError
from shmsched.wire.link import Link


class Receiver(threading.Thread):
    """Runs until the connection is over, and ends everything with the reason."""

    def __init__(self, link: Link, state: ClientState, make_session: MakeSession) -> None:
        super().__init__(name="shmsched-receiver", daemon=True)
        self._link = link
        self._state = state
        self._make_session = make_session

    def run(self) -> None:
        self._state.end(self._receive())
        if self._state.closed:
            self._link.close()

    def _receive(self) -> ShmschedError:
        """Handle frames until there are no more. Returns why."""
        try:
            while (arrived := self._link.receive()) is not None:
                for message in arrived:
                    self._state.handle(message, self._make_session)
        except ShmschedError as e:
            return e
        except BaseException as e:
            # A callback may have raised SystemExit, or the fault is ours; nobody may wait for this thread from now on.
            traceback.print_exc()
            return ClientClosed(f"the client's receiver was ended by {type(e).__name__}: {e}")
        return self._state.end_of_stream()

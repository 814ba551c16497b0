"""What belongs to one event loop, and is refused in every other one."""

from __future__ import annotations

import asyncio
import threading

from shmsched.client.core import ClientCore
from shmsched.errors import InvalidRequest, WrongLoop


class InOneLoop(ClientCore):
    """A client of which everything happens in the loop that it was connected in."""

    _connected = False
    _loop: asyncio.AbstractEventLoop | None = None
    """The one that it was connected in, or is being connected in."""
    _thread = ""
    """The name of that loop's, for who is told of it."""

    def _belongs_here(self) -> asyncio.AbstractEventLoop:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.current_thread().name
        return self._loop

    @property
    def _own_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop

    def _check_usable(self) -> None:
        if not self._connected:
            raise InvalidRequest("this client is not connected; enter it with `async with`, or await client.connect()")
        super()._check_usable()

    def _check_here(self) -> None:
        """Raises WrongLoop elsewhere than in the loop that the client was connected in, and InvalidRequest before that."""
        if not self._connected:
            self._check_usable()
        if asyncio._get_running_loop() is not self._loop:
            if self._inherited:
                # A forked child is in no loop of its parent's.
                self._check_usable()
            raise self._elsewhere()

    def _elsewhere(self) -> WrongLoop:
        own, here = self._loop, asyncio._get_running_loop()
        used = "in no event loop" if here is None else f"in the event loop {here!r} at {id(here):#x}"
        over = own is not None and own.is_closed()
        instead = (
            "that one is closed; make a client in this one" if over else "use it there, or make a client in this one"
        )
        return WrongLoop(
            f"this AsyncClient was connected in the event loop {own!r} at {id(own):#x} (thread {self._thread}), and is used"
            f" {used} (thread {threading.current_thread().name}): {instead}"
        )

"""A session as a synchronous client holds it."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from shmsched.client.client_session import ClientSession
from shmsched.client.futures import StepFuture, WaitingStream
from shmsched.client.generation.generation import Generation

_CLOSING_S = 60.0
"""How long a call waits for a dropped generation's last step; then it says that the session is generating."""


class Session(ClientSession[StepFuture, WaitingStream, Generation, "Session"]):
    """One sequence's state in one engine. Made by ``Client.open_session``; use it in a ``with`` block or ``close()`` it.

    It may be used from any thread. ``position`` is where the next submission starts.
    """

    _generation = Generation
    _guarded: threading.Thread | None = None
    """Closes a generation that was dropped where its finalizer could not wait."""

    def close(self) -> None:
        """End the session. What is outstanding fails with SessionClosed. Idempotent."""
        self._client._close_session(self)

    def reopen(self, timeout: float | None = None) -> None:
        """After SessionLost: stand for a new, empty session of the same model, options and seed, on a living engine.

        Raises what ``Client.open_session`` raises.
        """
        self._client._drive(self._client._reopening, self, timeout)

    @property
    def position(self) -> int:
        self._guard()
        return super().position

    @property
    def history(self) -> npt.NDArray[np.int32]:
        self._guard()
        return super().history

    def _guard(self) -> None:
        """Wait until a dropped generation has let go of the session, unless that waits for this very thread."""
        closing = self._guarded
        if closing is None or closing is threading.current_thread() or self._client._holds_up_others():
            return
        if closing.is_alive():
            closing.join(_CLOSING_S)
        self._guarded = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""A generation whose caller is a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shmsched.client.collected import is_ours
from shmsched.client.futures import StepFuture
from shmsched.client.generation.effects import Await, Effect, Emit, Next
from shmsched.client.generation.outcome import Outcome
from shmsched.client.generation.start import Start
from shmsched.steps import Response

if TYPE_CHECKING:
    from shmsched.client.session import Session

_FINALIZER_WAITS_S = 0.05


class Generation(Outcome):
    """The tokens of a generation, as they come. Made by ``Session.generate``; for one thread at a time.

    It is under way from the call on. Iterate over it, or take tokens with ``next``. It is cancelled within one step when a loop
    over it is left, by ``close()``, and at the end of a ``with`` block. The session then stands as if only the tokens that were
    given had been sampled, the last of them not fed yet: another ``generate`` goes on from there. ``tokens``, ``text``,
    ``finish_reason``, ``timings`` and ``error`` can be read at any time.

    Raises what the steps fail with, and then the session stands the same way, if it is not lost.
    """

    def __init__(self, session: Session, start: Start, deadline: float | None) -> None:
        super().__init__(session, start, deadline)
        try:
            effect = self._resume()
            while effect is not None and not isinstance(effect, Await | Next | Emit):
                effect = self._advance(effect)
        except BaseException:
            # Nobody will have it, and an interrupt's trace may keep it for as long as that is looked at.
            self.close()
            raise

    def __next__(self) -> int:
        try:
            effect = self._resume() if isinstance(self._effect, Emit) else self._effect
            while effect is not None:
                if isinstance(effect, Emit):
                    return effect.token
                effect = self._advance(effect)
        except BaseException:
            # It has ended, unless an interrupt has kept from the plan what an effect came to: so it cannot go on.
            self.close()
            raise
        raise StopIteration

    def __iter__(self) -> Iterator[int]:
        try:
            while True:
                try:
                    token = next(self)
                except StopIteration:
                    return
                yield token
        finally:
            self._finalize()

    def increments(self) -> Iterator[str]:
        """The text as it comes, at character boundaries, up to the stop text. Raises Unsupported without a tokenizer."""
        stream = self._text_so_far()
        for token in self:
            if text := self._increment(stream, token):
                yield text
        if text := self._last_increment(stream):
            yield text

    def close(self) -> None:
        """Cancel what has not come yet. Idempotent."""
        if self._reason is not None or self._pid != os.getpid():
            return
        effect = self._leave()
        while effect is not None:
            effect = self._advance(effect)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_pid", None) is not None:
            self._finalize()

    def _finalize(self) -> None:
        """Close, though the collector may run this anywhere, where this very thread holds the client's lock among others."""
        if self._reason is not None or not is_ours(self._pid):
            return
        if self._session._client._can_wait_here(_FINALIZER_WAITS_S):
            self.close()
        else:
            closing = threading.Thread(target=self.close, name="shmsched-close")
            self._session._guarded = closing
            closing.start()

    def _advance(self, effect: Effect) -> Effect | None:
        try:
            result = self._perform(effect)
        except BaseException as e:
            return self._resume(error=e)
        if type(effect) is Next:
            self._clock.hear(effect.stream, result.arrived)
        return self._resume(result)

    def _wait_for(self, step: StepFuture) -> Response:
        response = step.result()
        self._clock.hear(step, step.arrived)
        return response

"""The lock that guards a client, and what was decided under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shmsched.locks import OwnedLock

T = TypeVar("T")


class Decisions:
    """What changes more than one thing is made ready first, then *decided* by one store, and then done in a way that may be done
    again from the beginning. So an interrupt leaves it not decided, and nothing has happened; or decided, and whoever takes the lock
    next does it (again) before anything else.
    """

    def __init__(self) -> None:
        self.lock = OwnedLock()
        self.decided: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        """What is to be done, with what. To be looked at whenever the lock is taken."""

    def under_lock(self, do: Callable[..., T], *arguments: Any) -> T:
        """``do`` it under the lock. What is done for every step does the same by itself."""
        try:
            with self.lock:
                self.finish()
                return do(*arguments)
        except BaseException:
            self.interrupted()
            raise

    def decide(self, do: Callable[..., None], *arguments: Any) -> None:
        """The caller holds the lock. ``do`` raises nothing of its own accord."""
        self.decided = do, arguments
        do(*arguments)
        self.decided = None

    def finish(self) -> None:
        """Do what was decided and not done. The caller holds the lock."""
        if self.decided is not None:
            do, arguments = self.decided
            do(*arguments)
            self.decided = None

    def interrupted(self) -> None:
        """What was called under the lock has raised: give it back, if it was an interrupt that kept it, and finish what was
        decided."""
        self.lock.give_up()
        if self.decided is not None:
            try:
                with self.lock:
                    self.finish()
            finally:
                self.lock.give_up()

"""Clients and sessions that nobody refers to any more, and that were not closed: they close, and say so.

A collector may run a finalizer in any thread and in the middle of anything. So it takes no lock and sends nothing: it notes what
is to be done, and wakes whoever does it.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Calls the method as long as its object lives, and does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    return call


def is_ours(
    pid: int,
    _finalizing: Callable[[], bool] = sys.is_finalizing,
    _getpid: Callable[[], int] = os.getpid,
) -> bool:
    """Whether a finalizer has anything to do for what process ``pid`` has made: not in a forked child, nor as the interpreter ends,
    when the system closes everything."""
    return not _finalizing() and _getpid() == pid


def say_dropped(what: str, instead: str, source: object, _warn: Callable[..., None] = warnings.warn) -> None:
    """Warn of something that was dropped. To be called last in a finalizer: a filter may make it an exception."""
    _warn(f"{what} was dropped without being closed, and is closed now; {instead}", ResourceWarning, source=source)

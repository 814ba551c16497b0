"""A connection to a daemon, whether its caller waits or awaits."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Mapping
from types import MappingProxyType

from shmsched.arguments import number, path, shown, text, whole_or_none
from shmsched.client.channel import Channel
from shmsched.client.flows import Flow, Until, after, hearing
from shmsched.client.models import Model
from shmsched.client.state import HANDSHAKE_S, ClientState, Greeting
from shmsched.errors import ClientClosed, InvalidRequest, UsedAfterFork
from shmsched.not_copied import NotCopied
from shmsched.params import SamplingParams
from shmsched.wire import frames
from shmsched.wire.link import RETRY_S, Link
from shmsched.wire.socket_path import default_socket

LONGEST_NAME = 255
"""Bytes of a model's."""
BLOCK_TIMEOUT_S = 60.0
"""How long a submission waits for room unless it says otherwise."""
_clients: weakref.WeakSet[ClientCore] = weakref.WeakSet()


class ClientCore(NotCopied):
    """A connection to a daemon. Whoever inherits from it waits, each in its own way."""

    _link: Link
    _state: ClientState
    _channel: Channel

    def __init__(self, socket: str | os.PathLike[str] | None, wait: float, arena_bytes: int | None) -> None:
        self._path = str(default_socket()) if socket is None else path("socket", socket)
        self._wait = number("wait", wait, 0, float("inf"))
        self._closed_up = False
        self._pid = os.getpid()
        self._inherited = False
        """In a process that inherited the client by fork. Asking for the process's number each time is a system call."""
        self._arena_bytes = whole_or_none("arena_bytes", arena_bytes, 1, 2**63 - 1)

    def _greeted(self, link: Link, state: ClientState) -> None:
        self._link, self._state, self._channel = link, state, state.channel
        _clients.add(self)

    def _connecting(self) -> Flow[tuple[Link, ClientState]]:
        """Raises SchedulerUnreachable, and what the daemon says where it refuses the client."""
        attempts = Link.attempts(self._path, frames.Role.CLIENT, self._wait)
        while (link := next(attempts)) is None:
            yield Until(None, after(RETRY_S))
        try:
            at = f"the daemon at {self._path}"
            closed, silent = f"{at} closed the connection during the greeting", f"{at} did not greet"
            return link, (yield from hearing(link, Greeting(link).hear, HANDSHAKE_S, closed, silent))
        except BaseException:
            link.close()
            raise

    @property
    def models(self) -> Mapping[str, Model]:
        """The models that are served now, by name."""
        self._check_usable()
        return MappingProxyType(self._state.models)

    def _check_usable(self) -> None:
        self._channel.check_alive()

    def _check_here(self) -> None:
        """Raises where the client is not to be used here, or not any more."""
        self._check_usable()

    def _close_state(self, *, tell: bool = True) -> None:
        """Whatever ended it before: from here on it is closed. ``tell``: whether anybody can still wait for an answer."""
        error = ClientClosed("the client was closed; make another one")
        self._channel.dead = error
        self._state.closed = True
        if tell:
            self._state.end(error)

    def _has_closed(self) -> None:
        # What is leased keeps the arena mapped; a closed client that somebody still refers to does not.
        self._channel.arena = self._state.arena = None
        self._closed_up = True

    def _forked(self) -> None:
        """In a forked child: its copy of the socket would hide this client's end from the daemon."""
        self._inherited = True
        self._channel.dead = UsedAfterFork(
            f"this client was made in process {self._pid}; make a new one in this process ({os.getpid()})"
        )
        self._link.abandon()


def checked_options(options: bytes) -> bytes:
    """An engine's options of a session. Raises InvalidRequest."""
    if not isinstance(options, bytes) or len(options) > frames.MAX_OPTIONS:
        size = len(options) if isinstance(options, bytes) else 0
        raise InvalidRequest(
            f"options are {f'{size} bytes' if size else shown(options)}; bytes, at most {frames.MAX_OPTIONS:,}, are wanted"
        )
    return options


def checked_model(model: str | None) -> str | None:
    """A model's name, or None. Raises InvalidRequest."""
    return None if model is None else text("model", model, most_bytes=LONGEST_NAME)


def checked_seed(seed: int | None) -> int:
    """``seed``, or one that is drawn. Raises InvalidRequest."""
    value = secrets.randbits(64) if seed is None else SamplingParams(seed=seed).seed
    assert value is not None
    return value


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)

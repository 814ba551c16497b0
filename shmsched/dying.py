"""Where in a function a process dies that was told to: the wrappers that ``death_points`` puts in place."""

from __future__ import annotations

import functools
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from shmsched.wire.codec import pack, unpack
from shmsched.wire.framing import framed
from shmsched.wire.link import Link
from shmsched.wire.listener import Listener
from shmsched.wire.peer import Peer

Function = Callable[..., Any]
Wrap = Callable[[Function, Callable[[], bool]], Function]
"""Makes the wrapper of a function. It dies where it is to if the second one says that it is time."""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(function: Function, is_time: Callable[[], bool]) -> Function:
    @functools.wraps(function)
    def dies(*args: Any, **kwargs: Any) -> Any:
        if is_time():
            _die()
        return function(*args, **kwargs)

    return dies


def after(function: Function, is_time: Callable[[], bool]) -> Function:
    @functools.wraps(function)
    def dies(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if is_time():
            _die()
        return result

    return dies


def on_accept(function: Function, is_time: Callable[[], bool]) -> Function:
    @functools.wraps(function)
    def dies(listener: Listener) -> Any:
        accepted = function(listener)
        if accepted is not None and is_time():
            _die()
        return accepted

    return dies


def on_message(wrap: Wrap, *kinds: type) -> Wrap:
    """Where a method is called with a frame of one of these kinds, packed or not."""

    def wrapped(function: Function, is_time: Callable[[], bool]) -> Function:
        dies = wrap(function, is_time)

        @functools.wraps(function)
        def chosen(owner: Any, message: Any, *args: Any) -> Any:
            said = unpack(message[4:]) if isinstance(message, bytes) else message
            return (dies if isinstance(said, kinds) else function)(owner, message, *args)

        return chosen

    return wrapped


def half_of_a_frame(function: Function, is_time: Callable[[], bool]) -> Function:
    """In ``send`` of a link or a peer: everything before the frame is sent, and then half of it."""

    @functools.wraps(function)
    def dies(sender: Link | Peer, message: Any, *args: Any) -> Any:
        if not is_time():
            return function(sender, message, *args)
        sender.flush()
        sock = socket.socket(fileno=sender._sock.fileno() if isinstance(sender, Link) else sender.sock.fileno())
        data = message if isinstance(message, bytes) else framed(pack(message))
        half = data[: len(data) // 2]
        if isinstance(sender, Peer) and args and args[0] >= 0:
            socket.send_fds(sock, [half], [args[0]])
        else:
            sock.sendall(half)
        return _die()

    return dies


def half_of_what_waits(function: Function, is_time: Callable[[], bool]) -> Function:
    @functools.wraps(function)
    def dies(link: Link) -> Any:
        if link._outbound and is_time():
            waits = b"".join(frame[0][sum(frame[1:]) :] for frame in link._outbound)
            link._sock.sendall(waits[: len(waits) // 2])
            _die()
        return function(link)

    return dies


def sent(function: Function, is_time: Callable[[], bool]) -> Function:
    """In ``send`` of a link: the frame has left, even where it is one for later."""

    @functools.wraps(function)
    def dies(link: Link, *args: Any) -> Any:
        function(link, *args)
        if is_time():
            link.flush()
            _die()

    return dies

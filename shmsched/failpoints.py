"""Points at which a process can be told to die, so that tests see what the others make of it.

``SHMSCHED_FAILPOINT=name`` or ``name:n`` in a process's environment has it kill itself with SIGKILL the n-th time that it comes to
that point. Off, a point is one comparison, once for a frame, a batch or a submission and never for each step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Literal, get_args

VARIABLE = "SHMSCHED_FAILPOINT"

# Every point, in the order of the path, and what has happened by then and what has not. ``half_sent``: all that was to be sent
# before, and half of the frame.
Name = Literal[
    "hello.half_sent",
    "hello.sent",
    "client.welcome.received",  # and the descriptor of its segment, which is not mapped
    "client.open_session.sent",
    "client.submit.written",  # tokens are in the ring; no frame speaks of them
    "client.submit.half_sent",
    "client.submit.sent",
    "client.flush.half_sent",  # an asynchronous client has sent half of what its tasks have submitted in one turn
    "client.completions.received",  # no record was read
    "client.stream.read",  # tokens of a generation were taken out of the stream; the scheduler goes on with it
    "client.open_arena.sent",
    "client.arena.received",  # its descriptor is here; it is not mapped
    "client.logits.leased",  # nobody has read them
    "client.cancel.sent",
    "client.fork.sent",
    "client.close_session.sent",
    "engine.offer.half_sent",
    "engine.offer.sent",
    "engine.attached",  # its segment is mapped; the engine has not started
    "engine.started",  # its ready is not sent
    "engine.ready.sent",
    "engine.open_session.received",
    "engine.session.opened",  # nobody knows
    "engine.arena.received",  # it is not mapped
    "engine.batch.pulled",  # out of its slot; forward was not called
    "engine.logits.written",  # into the clients' arenas; nothing is in the batch's slot
    "engine.results.written",  # statuses and sampled tokens are in the slot; the done is not sent
    "engine.done.half_sent",
    "engine.done.sent",
    "engine.follow.received",  # it has answered a batch, and comes to the one that it was to go on with
    "engine.close_session.received",
    "daemon.engine.spawned",  # the scheduler has not noted it
    "daemon.connection.accepted",  # nothing was read from it
    "daemon.hello.received",  # a client's, which has no memory yet
    "daemon.segment.named",  # made, and its name is still there: what the next start sweeps
    "daemon.welcome.half_sent",  # and with it the descriptor
    "daemon.offer.taken",  # it was not answered
    "daemon.session.placed",  # it has its slot; the engine was not told
    "daemon.session.opened",  # in the engine; its client was not told
    "daemon.tokens.copied",  # out of the client's ring; their step is not queued
    "daemon.steps.queued",  # no batch was formed
    "daemon.arena.made",  # the client was not told
    "daemon.batch.written",  # into the engine's slot; the engine was not told
    "daemon.work.half_sent",
    "daemon.follow.written",  # what an engine is to go on with is in its other slot; the engine was not told
    "daemon.done.received",  # nothing of it is settled
    "daemon.completions.written",  # they were not announced
    "daemon.stream.settled",  # tokens of generations, which are not in the client's segment yet; the next steps are not queued
    "daemon.completions.half_sent",
    "daemon.close_session.received",  # its engine was not told
    "daemon.client.lost",  # nothing of it is cleared away
    "daemon.engine.lost",  # its steps are not failed
    "daemon.stopping",  # it takes no new sessions; open ones go on
    "daemon.leaving",  # everything is settled and the engines have ended; the last words are not all sent
]

_armed: str | None = None
_left = 0


def hit(name: Name, last_act: Callable[..., object] | None = None, *args: object) -> None:
    """The process is at this point. If it is to die here, it does ``last_act(*args)`` before."""
    global _left
    if _armed is None or _armed != name:
        return
    _left -= 1
    if _left == 0:
        if last_act is not None:
            last_act(*args)
        os.kill(os.getpid(), signal.SIGKILL)


def arm(order: str) -> None:
    """Have this process die at ``name`` or ``name:n``. Raises ValueError that lists the names."""
    global _armed, _left
    name, _, count = order.partition(":")
    if name not in get_args(Name) or not (count or "1").isdecimal() or int(count or 1) < 1:
        raise ValueError(
            f"{VARIABLE} is {order!r}; it must be name or name:n, n from 1 on. Names: {', '.join(get_args(Name))}"
        )
    _armed, _left = name, int(count or 1)


if VARIABLE in os.environ:
    arm(os.environ[VARIABLE])

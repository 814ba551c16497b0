"""The attached engines: from offer to death."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from shmsched.daemon.client_link import ClientLink
from shmsched.daemon.connections import Connection, Connections
from shmsched.daemon.engine_link import EngineLink, EngineState
from shmsched.daemon.models import tell_models
from shmsched.daemon.supervisor import Supervisor, Worker
from shmsched.errors import ErrorCode, ProtocolError
from shmsched.wire import frames

if TYPE_CHECKING:
    from shmsched.daemon.server import Daemon


class Engines:
    """All engines by number: one incarnation each."""

    def __init__(
        self,
        daemon: Daemon,
        connections: Connections,
        supervisor: Supervisor,
        clients: Callable[[], Iterable[ClientLink]],
    ) -> None:
        self.links: dict[int, EngineLink] = {}
        self._daemon = daemon
        self._connections = connections
        self._supervisor = supervisor
        self._clients = clients

    def offered(self, connection: Connection, offer: frames.Offer) -> EngineLink:
        """An engine has connected and said what it serves. Raises ProtocolError if it does not fit its model's others."""
        for other in self.links.values():
            if other.offer.model == offer.model and other.offer.vocab_size != offer.vocab_size:
                raise ProtocolError(
                    f"engine {offer.spec} serves model {offer.model!r} with a vocabulary of {offer.vocab_size}; engine"
                    f" {other.offer.spec} serves it with {other.offer.vocab_size}. Give one of them another model name"
                )
        config = self._daemon.config
        limits = config.params.within(
            offer.max_batch_size or None, offer.max_decode_sequences or None, offer.max_prefill_chunk_size or None
        )
        link = EngineLink(self._daemon.next_number(), connection.peer, offer, limits, config.linger_share)
        link.hang_up = lambda: self._connections.drop(connection, "the scheduler let the engine go")
        link.read = lambda: self._connections.read_all(connection)
        link.read_and_hang_up = lambda why: self._connections.read_and_drop(connection, why)
        self.links[link.number] = link
        worker = self._supervisor.worker_of(connection.peer.pid)
        if worker is not None:
            self._supervisor.attached(worker, link)
        attached = frames.Attached(link.number, limits.max_decode_sequences, limits.max_prefill_chunk_size, 1)
        connection.peer.send(attached, link.segment.fd)
        link.segment.close_descriptor()
        return link

    def ready(self, link: EngineLink) -> None:
        """The engine has started."""
        link.state = EngineState.READY
        worker = self._supervisor.worker_of(link.peer.pid)
        if worker is not None:
            self._supervisor.is_ready(worker)
        else:
            self._daemon.log(
                f"engine {link.offer.spec} (pid {link.peer.pid}) is attached, for model {link.offer.model!r}"
            )
        self._changed()

    def failed_to_start(self, pid: int, reason: str) -> None:
        """An engine says why it will not be ready; the end of its process follows."""
        worker = self._supervisor.worker_of(pid)
        if worker is not None:
            worker.reason = reason
        else:
            self._daemon.log(f"the engine with pid {pid} did not start: {reason}")

    def hangs(self, link: EngineLink) -> None:
        """Its batch has run for the whole step time-out. Its steps fail now; its rows return once it is dead."""
        link.read()
        batch = link.batch
        limit = self._daemon.config.step_timeout_s
        if batch is None or link.state is EngineState.DEAD or time.monotonic() < batch.started + limit:
            return
        message = (
            f"engine {link.offer.spec} (pid {link.peer.pid}) has not finished batch {batch.number} of {len(batch.steps)} steps"
            f" within {limit:g} s; it is killed"
        )
        self._daemon.log(message)
        link.abandon(ErrorCode.ENGINE_TIMEOUT, message, self._daemon)
        self._changed()
        # The end of its connection, which comes with its death, does the rest.
        try:
            os.kill(link.peer.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def lost(self, link: EngineLink, why: str) -> None:
        """Its connection is gone: whatever its process still does, it gets no more work and its answers count no more."""
        ending = self._daemon.ending
        if link.state is not EngineState.DEAD:
            holding = f" while it ran batch {link.batch.number}" if link.batch is not None else ""
            message = f"engine {link.offer.spec} (pid {link.peer.pid}) ended{holding}: {why}"
            if not ending:
                self._daemon.log(message)
            link.abandon(ErrorCode.SCHEDULER_STOPPED if ending else ErrorCode.ENGINE_DIED, message, self._daemon)
        del self.links[link.number]
        worker = self._supervisor.worker_of(link.peer.pid)
        if worker is not None and worker.link is link:
            if not ending:
                self._supervisor.kill(worker)
        else:
            # Not our child. Its host closes the connection only when no forward pass runs any more, and the kernel only
            # when no thread of it is left.
            link.buried()
        self._changed()

    def worker_died(self, worker: Worker) -> None:
        """The process is reaped: nothing of it writes anywhere any more."""
        if worker.link is not None:
            worker.link.read_and_hang_up(worker.last_exit)
            worker.link.buried()
        self._daemon.sessions.slots_changed = True

    def _changed(self) -> None:
        self._daemon.sessions.slots_changed = True
        tell_models(self.links.values(), self._clients())

"""What a daemon is made of."""

from __future__ import annotations

from shmsched.daemon.clients import Clients
from shmsched.daemon.clock import Clock
from shmsched.daemon.config import DaemonConfig
from shmsched.daemon.connections import Connections
from shmsched.daemon.deadlines import Deadlines
from shmsched.daemon.engines import Engines
from shmsched.daemon.lookout import Lookout
from shmsched.daemon.loop import EventLoop
from shmsched.daemon.outcomes import Outcomes
from shmsched.daemon.overload import Overload
from shmsched.daemon.placement import Placement
from shmsched.daemon.sessions import Sessions
from shmsched.daemon.supervisor import Supervisor, Worker
from shmsched.daemon.telling import Telling
from shmsched.dataplane.admission import Admission
from shmsched.dataplane.completions import Completions
from shmsched.dataplane.core import Core
from shmsched.dataplane.session import Step
from shmsched.errors import ErrorCode
from shmsched.memory.segment import sweep
from shmsched.saying import counted, say
from shmsched.wire.listener import Listener


class Parts:
    """All of them, and how they hang together."""

    def __init__(self, config: DaemonConfig, clock: Clock | None) -> None:
        self.config = config
        self.stopping = False
        """No new sessions."""
        self.loop = EventLoop(clock)
        self.started = self.loop.clock.now()
        self._listener = Listener(config.socket)
        sweep()
        self.deadlines = Deadlines(self.loop, self._deadline_passed)
        self.core = Core(self.loop.clock, self.deadlines.add)
        self.admission = Admission(self.core)
        self.completions = Completions(self.core)
        self.telling = Telling(self.loop, self.core.touched_clients)
        self.supervisor = Supervisor(config, self.loop, self._worker_died, self.log)
        self.placement = Placement(
            lambda: self.engines.links.values(), lambda: self.supervisor.coming, lambda: self.supervisor.down
        )
        self.sessions = Sessions(self.core, self.completions, self.placement)
        self.outcomes = Outcomes(self.core, self.completions, self.sessions)
        self.clients = Clients(config, self.core, self.loop, self.sessions, lambda: self.engines.links.values())
        self.connections = Connections(self.loop, self._listener, config.max_clients)
        self.overload = Overload(self.connections, config.max_queued_steps, lambda: self.waiting_for_engines)
        self.engines = Engines(
            config, self.core, self.loop, self.outcomes, self.sessions, self.connections, self.supervisor, self.clients, self.log
        )  # fmt: skip
        self.lookout = Lookout(self.core, self.loop, self.clients.links, self.engines.links, self.log)

    def log(self, message: str) -> None:
        """One line, whatever an engine has to say."""
        say(f"shmsched: {' '.join(message.split())}")

    @property
    def waiting_for_engines(self) -> int:
        """Steps in the engines' queues. Others may wait for their client to read, which it must be able to say that it has."""
        return sum([len(engine.queues) for engine in self.engines.links.values()])

    def _worker_died(self, worker: Worker) -> None:
        self.engines.worker_died(worker)

    def _deadline_passed(self, step: Step) -> None:
        late = self.loop.clock.now() - step.deadline
        self.completions.fail_from(
            step.session,
            step.number,
            step.position,
            ErrorCode.DEADLINE_EXCEEDED,
            f"the step at position {step.position} of session {step.session.client_id} was not dispatched by its deadline"
            f" ({1000 * late:.1f} ms ago); {counted(self.core.ledger.queued, 'step is', 'steps are')} queued",
        )

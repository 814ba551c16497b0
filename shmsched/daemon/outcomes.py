"""What becomes of the batches that engines were given: their steps are answered, fail, wait or are lost."""

from __future__ import annotations

from shmsched.daemon.engine_link import EngineLink, EngineState
from shmsched.daemon.loop import contained
from shmsched.daemon.sessions import Sessions
from shmsched.dataplane.batches import DONE, Batch
from shmsched.dataplane.completions import Completions
from shmsched.dataplane.core import Core
from shmsched.dataplane.layouts import StepStatus
from shmsched.dataplane.session import Step
from shmsched.dataplane.step import StepState
from shmsched.errors import ErrorCode
from shmsched.wire import frames


class Outcomes:
    """Settles what engines have answered, or never will."""

    def __init__(self, core: Core, completions: Completions, sessions: Sessions) -> None:
        self._core = core
        self._completions = completions
        self._sessions = sessions

    def done(self, link: EngineLink, message: frames.Done) -> None:
        """Settle a batch by its results."""
        self._core.touched_engines.add(link)
        batch = link.take_back(message.batch)
        if batch is None:
            return
        try:
            all_done = link.batches.read(batch, message.messages)
        except ValueError as e:
            self._lose(link, batch, f"engine {link.offer.spec} ({link.peer.name}) gave results that do not fit: {e}")
            return
        try:
            self._settle(link, batch, all_done)
        except Exception:
            # The engine ends now, which settles what is left of the batch.
            link.batches.put_back(batch)
            raise

    def _settle(self, link: EngineLink, batch: Batch, all_done: bool) -> None:
        """``all_done``: each step that the engine was given was answered."""
        messages = iter(batch.messages)
        deferred: list[Step] = []
        place = self._completions.complete(batch, 0)
        while place < len(batch.steps):
            # The one that has no answer, or was settled before.
            step: Step = batch.steps[place]
            status = batch.statuses[place]
            if status == DONE:
                self._core.ledger.ignore()
                step.session.client.return_rows(step)
            elif status == StepStatus.DEFERRED:
                deferred.append(step)
            elif status == StepStatus.NO_ARENA:
                why = link.arenas.lacks(step.session.client, next(messages))
                self._fail(link, step, why, ErrorCode.SHARED_MEMORY_LIMIT)
            else:
                self._fail(link, step, message := next(messages))
                if status == StepStatus.SPOILT:
                    self._sessions.spoilt(step, message)
            batch.answered += step.n_results
            place = self._completions.complete(batch, place + 1)
        link.finish(batch, batch.came)
        link.go_on(batch.followers, ran=all_done)
        self._requeue(link, deferred, len(deferred) == batch.size)

    def skipped(self, link: EngineLink, message: frames.Skipped) -> None:
        """The engine has not run what was to follow a batch, because not all of that was done."""
        self._core.touched_engines.add(link)
        batch = link.take_back(message.batch)
        if batch is not None:
            link.go_on({}, ran=False)
            self._requeue(link, batch.steps, False)

    def batch_failed(self, link: EngineLink, message: frames.BatchFailed) -> None:
        """The engine raised: the batch's steps fail and its sessions are lost."""
        self._core.touched_engines.add(link)
        batch = link.take_back(message.batch)
        if batch is not None:
            self._lose(link, batch, f"engine {link.offer.spec} ({link.peer.name}) raised {message.message}")

    def abandon(self, link: EngineLink, code: ErrorCode, message: str) -> None:
        """The engine is as good as dead: settle everything it held."""
        link.state = EngineState.DEAD
        if link.batch is not None:
            self._fail_all(link.batch, code, message)
        for session in list(link.sessions.values()):
            with contained():
                self._sessions.lose(session, message)
        link.end()

    def _fail(self, link: EngineLink, step: Step, message: str, code: ErrorCode = ErrorCode.STEP_FAILED) -> None:
        if step.state is StepState.IN_FLIGHT:
            session = step.session
            words = f"engine {link.offer.spec} failed the step at position {step.position} of session {session.client_id}: {message}"
            self._completions.fail_from(session, step.number, step.position, code, words)
        step.session.client.return_rows(step)

    def _fail_all(self, batch: Batch, code: ErrorCode, message: str) -> None:
        for step in batch.steps:
            if step.state is StepState.IN_FLIGHT:
                self._completions.fail_from(step.session, step.number, step.position, code, message)

    def _requeue(self, link: EngineLink, deferred: list[Step], nothing_ran: bool) -> None:
        """Deferred steps go back to the front, the last one first, so that they keep their order."""
        requeued = 0
        for step in reversed(deferred):
            if self._core.ledger.requeue(step):
                link.queues.push_front(step)
                if step.deadline:
                    self._core.watch(step)
                requeued += 1
            else:
                step.session.client.return_rows(step)
        if requeued and nothing_ran and link.sessions:
            # Nothing ran, so nothing will make room by itself: without this the same batch would go round for ever.
            youngest = max(link.sessions.values(), key=lambda s: s.number)
            self._sessions.end(
                youngest,
                ErrorCode.SESSION_LOST,
                f"engine {link.offer.spec} deferred everything; session {youngest.client_id}, the youngest, made room",
            )

    def _lose(self, link: EngineLink, batch: Batch, message: str) -> None:
        link.finish(batch, [])
        sessions = {session.number: session for session in batch.sessions}
        self._fail_all(batch, ErrorCode.ENGINE_ERROR, message)
        for step in batch.steps:
            step.session.client.return_rows(step)
        for session in sessions.values():
            self._sessions.lose(session, message)
        link.go_on({}, ran=False)

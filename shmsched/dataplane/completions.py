"""The one place where steps end: whoever takes a step out of the ledger answers its client."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from shmsched import failpoints
from shmsched.dataplane.batches import DONE, Batch
from shmsched.dataplane.core import Core
from shmsched.dataplane.layouts import RECORD, RESULT, RecordKind
from shmsched.dataplane.session import ClientPort, Session, Step
from shmsched.dataplane.step import StepState
from shmsched.errors import ErrorCode
from shmsched.not_copied import not_copied

TOKEN, TOKENS, LOGITS = int(RecordKind.TOKEN), int(RecordKind.TOKENS), int(RecordKind.LOGITS)


class Completions:
    """Completes, fails and cancels steps: ledger, queue, session and client, in that order, each once."""

    __slots__ = ("core",)
    __reduce__ = not_copied

    def __init__(self, core: Core) -> None:
        self.core = core

    def complete(self, batch: Batch, first: int) -> int:
        """An engine has answered these steps of the batch, from the ``first`` on. Stops at the first that was not done, or was
        settled before: its answer goes nowhere. Returns where that one is."""
        core, steps, ids, logprobs, started = self.core, batch.steps, batch.ids, batch.logprobs, batch.started
        end = core.ledger.complete_run(steps, batch.statuses, first, DONE)
        now, at, n_followers, pack = 0.0, batch.answered, 0, RECORD.pack
        answered: set[Any] = set()
        client: ClientPort | None = None
        answers: list[bytes] = []
        for place in range(first, end):
            step: Step = steps[place]
            session, spec, n, waited = step.session, step.spec, step.n_rows, started - step.entered
            del session.outstanding[step.number]
            if client is None or session.client is not client:
                client = session.client
                answers = client.answers
                answered.add(client)
            if not spec.sampled:
                answers.append(pack(step.request, n, LOGITS, waited, 0, 0.0))
            else:
                generation = spec.generation
                if (
                    generation is not None
                    and generation.further > 0
                    and ids[at] not in generation.stop_tokens
                    and not client.closed
                ):
                    generation.further -= 1
                    n_followers += 1
                    now = now or core.clock.now()
                    follower = self._follow(step, ids[at], logprobs[at], waited, now)
                    if follower is not None:
                        batch.followers[place] = follower
                    at += 1
                    continue
                client.outstanding_results -= n
                if n == 1:
                    answers.append(pack(step.request, 1, TOKEN, waited, ids[at], logprobs[at]))
                else:
                    client.token_answers.extend(map(RESULT.pack, ids[at : at + n], logprobs[at : at + n]))
                    answers.append(pack(step.request, n, TOKENS, waited, 0, 0.0))
                at += n
            if not spec.more:
                client.awaited = True
            if n > 0 and not session.outstanding:
                batch.came.append(session.number)
        batch.answered = at
        core.ledger.enter_many(n_followers)
        for client in answered:
            try:
                client.answered()
                core.touched_clients.add(client)
            except Exception as e:
                client.blame(e)
        if now:
            failpoints.hit("daemon.stream.settled")
        return end

    def _follow(self, step: Step, token: int, logprob: float, waited: float, now: float) -> Step | None:
        """The decode that follows this one, entered. None if it is queued only once its client has read."""
        core, session = self.core, step.session
        client, spec, position = session.client, step.spec, step.position + step.n_tokens
        tokens = token.to_bytes(4, "little")
        follower = session.add(next(core.numbers), step.request, 1, 1, tokens, position, spec, now)
        if spec.deadline != 0.0:
            core.watch(follower)
        try:
            if not client.streamed(follower, token, logprob, waited):
                return None
        except Exception as e:
            client.blame(e)
        return follower

    def fail_from(self, session: Session, first: int, position: int, code: ErrorCode, message: str) -> int:
        """Settle every outstanding step of the session from step number ``first`` on. Returns how many.

        The later ones go too: they were meant to follow a step that did not happen. The session's next position is at most
        ``position``, and at most where any of them started.
        """
        steps = []
        for number in reversed(session.outstanding):
            if number < first:
                break
            steps.append(session.outstanding[number])
        session.next_position = min([session.next_position, position] + [step.position for step in steps])
        if steps and code is not ErrorCode.CANCELLED:
            session.cut_off = (code, message)
        self._settle(reversed(steps), code, message)
        return len(steps)

    def fail_session(self, session: Session, code: ErrorCode, message: str) -> None:
        """Settle everything outstanding in the session."""
        self.fail_from(session, 0, session.next_position, code, message)

    def _settle(self, steps: Iterable[Step], code: ErrorCode, message: str) -> None:
        by_client = code in (ErrorCode.CANCELLED, ErrorCode.SESSION_CLOSED)
        ledger = self.core.ledger
        told: dict[tuple[Any, bool], list[int]] = defaultdict(list)
        for step in steps:
            session = step.session
            was_queued = step.state is StepState.QUEUED
            if not (ledger.cancel(step) if by_client else ledger.fail(step)):
                continue
            del session.outstanding[step.number]
            if was_queued and session.engine is not None:
                session.engine.queues.remove(step)
            # An engine may still write into the rows of a step in flight, whatever became of the step.
            rows_held = step.raw_rows > 0 and not was_queued
            try:
                session.client.settled_without_answer(step)
            except Exception as e:
                session.client.blame(e)
            told[session.client, rows_held].append(step.request)
        for (client, rows_held), requests in told.items():
            try:
                client.tell_failed(code, message, requests, rows_held)
            except Exception as e:
                client.blame(e)

"""A session that submits, waits, checks what came, and submits again."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass

import numpy as np

from shmsched import (
    Client,
    Full,
    InvalidRequest,
    Model,
    OutputRows,
    Request,
    RequestParams,
    Response,
    SamplingParams,
    Session,
    SessionClosed,
    ShmschedError,
    StepFuture,
)
from shmsched.tools.load.choices import Submission, Turn, Turns
from shmsched.tools.load.mirror import I64, Mirror
from shmsched.tools.load.part import RETRY_S, Parent
from shmsched.tools.load.rows import HeldLeases, RowCheck
from shmsched.tools.load.worker import Spoilt, Worker

GREEDY = SamplingParams()
ROOM_S = 5.0
STARVED = 1000
LATER_S = 0.002
_next_request = itertools.count(1 << 40)


@dataclass(slots=True, eq=False)
class Flight:
    """A submission on its way, or answered and not yet looked at."""

    session_id: int
    part: Submission
    start: int
    steps: int
    expected: I64
    future: StepFuture
    request_id: int | None
    submitted: float
    answered: float = 0.0
    cancelled: bool = False
    """As asked, or because it follows one that was."""

    def land(self, _: object) -> None:
        self.answered = time.perf_counter()

    def __str__(self) -> str:
        kind = "raw" if self.part.raw else "sampled"
        rows = self.part.rows.name
        return f"session {self.session_id}, {len(self.part.tokens)} tokens at {self.start}, {kind}, rows {rows}"


class Submitting(Worker):
    """Waits in a thread."""

    def __init__(
        self, client: Client, model: Model, parent: Parent, over: threading.Event, index: int, seed: tuple[int, ...]
    ) -> None:
        super().__init__(client, model, parent, over, index)
        plan = parent.plan
        self._client = client
        self._turns = Turns(plan.options.mode, self.vocab, self.max_chunk, self.max_tokens, seed, plan.cancel)
        self._check = RowCheck(self.vocab)
        self._held = HeldLeases(self._check)
        self._mirror = Mirror(self.vocab)
        self._go_on_at = 0
        self._starved = 0

    async def use(self, session: Session) -> None:
        self._mirror, self._go_on_at = Mirror(self.vocab), 0
        while not (self.over.is_set() or self._turns.session_ends()):
            if len(self._mirror) + self._turns.most_tokens > self.max_tokens:
                break
            turn = self._turns.turn(self._mirror, self._go_on_at)
            self._take(session, turn)
            if turn.close:
                return
            if session.ended is None and session.position != len(self._mirror):
                self.spoilt(session, f"stands at position {session.position}, not {len(self._mirror)}")
        self._give_back(self._held.check_all())
        self.compare(session, self._mirror)

    def _give_back(self, faults: list[str]) -> None:
        for fault in faults:
            self.wrong(fault)

    def _take(self, session: Session, turn: Turn) -> None:
        flights: list[Flight] = []
        refused: ShmschedError | None = None
        try:
            for part in turn.parts:
                flights.append(self._submit(session, part))
                self.tally.pipelined += len(flights) > 1
        except ShmschedError as e:
            refused = e
        if turn.cancel is not None and turn.cancel < len(flights):
            if turn.cancel_later:
                time.sleep(self._turns.random.uniform(0.0, LATER_S))
            self._cancel(flights[turn.cancel :])
        if turn.close:
            session.close()
        goes_on = [self._landed(flight, closed=turn.close) for flight in flights]
        self.outstanding = 0
        if not all(goes_on):
            raise Spoilt
        if isinstance(refused, Full):
            self._make_room(refused)
        elif refused is not None:
            raise refused

    def _submit(self, session: Session, part: Submission) -> Flight:
        mirror, tally = self._mirror, self.tally
        position = self._go_on_at if part.rewind is None else int(self._go_on_at * part.rewind)
        rewinds = position < len(mirror)
        answers = mirror.answers(position, part.tokens)
        expected = {OutputRows.NONE: answers[:0], OutputRows.LAST: answers[-1:], OutputRows.ALL: answers}[part.rows]
        steps = -(-len(part.tokens) // self.max_chunk)
        request_id = next(_next_request) if part.as_request else None
        sampling = None if part.raw else GREEDY
        submitted = time.perf_counter()
        if request_id is not None:
            params = RequestParams(position, sampling, part.rows)
            request = Request(request_id, session.session_id, part.tokens, params)
            future = self._client.submit(request, block=part.block, block_timeout=ROOM_S)
        else:
            future = session.submit(
                part.tokens, position=position if rewinds else None, sampling=sampling, output_rows=part.rows,
                block=part.block, block_timeout=ROOM_S,
            )  # fmt: skip
        mirror.feed(position, part.tokens)
        self._go_on_at = len(mirror)
        tally.sent += steps
        tally.rewinds += rewinds
        self.outstanding += steps
        flight = Flight(session.session_id, part, position, steps, expected, future, request_id, submitted)
        future.add_done_callback(flight.land)
        return flight

    def _cancel(self, flights: list[Flight]) -> None:
        """Cancel the first of them, and with it the others, if it is not answered yet."""
        if not flights[0].future.cancel():
            self.tally.cancels_late += 1
            return
        self.tally.cancels += 1
        for flight in flights:
            flight.cancelled = True
        # None of them counts as having run, so the session holds what was there before the one that reached back furthest.
        self._mirror.rewind(min(flight.start for flight in flights))
        self._go_on_at = len(self._mirror)

    def _make_room(self, refused: Full) -> None:
        """It may be the rows held here that are missing. Raises if that came too often at a stretch."""
        self.tally.full += 1
        self._give_back(self._held.check_all())
        self._starved += 1
        if self._starved >= STARVED:
            raise refused
        time.sleep(RETRY_S)

    # --- what came ------------------------------------------------------------------------------------------------------

    def _landed(self, flight: Flight, *, closed: bool) -> bool:
        """Look at what became of a submission. False if its session cannot be checked any further."""
        tally = self.tally
        try:
            response = flight.future.result(self.patience_s)
        except CancelledError:
            if not flight.cancelled:
                self.failed(InvalidRequest("cancelled, though nobody asked"), flight.steps, str(flight))
                return False
            tally.cancelled += flight.steps
        except ShmschedError as e:
            if not (closed and isinstance(e, SessionClosed)):
                self.failed(e, flight.steps, str(flight))
                return False
            tally.closed += flight.steps
        except TimeoutError:
            tally.say_lost(flight.steps, str(flight))
            return False
        else:
            self._starved = 0
            self.parent.answered()
            tally.completed += flight.steps
            tally.tokens += len(flight.part.tokens)
            tally.took(flight.answered - flight.submitted)
            if fault := self._fault(flight, response):
                self.wrong(f"{flight}: {fault}")
            elif flight.part.draft and not (closed or flight.cancelled):
                self._accept(flight, response)
            self._give_back(self._held.check_due())
        return True

    def _fault(self, flight: Flight, response: Response) -> str | None:
        expected = flight.expected
        if response.session_id != flight.session_id:
            return f"the answer names session {response.session_id}"
        if flight.request_id is not None and response.request_id != flight.request_id:
            return f"the answer names request {response.request_id}, not {flight.request_id}"
        self.tally.rows_checked += len(expected)
        if flight.part.raw:
            return self._row_fault(response, expected) if len(expected) else None
        tokens = response.tokens
        if tokens.dtype != np.int64 or tokens.shape != expected.shape:
            return f"tokens are {tokens.dtype} {tokens.shape}, not int64 {expected.shape}"
        if not np.array_equal(tokens, expected):
            k = int(np.flatnonzero(tokens != expected)[0])
            return f"row {k} has token {tokens[k]}, not {expected[k]}"
        if response.logprobs is None or response.logprobs.shape != expected.shape:
            return "the log-probabilities are not one for each token"
        return None

    def _row_fault(self, response: Response, expected: I64) -> str | None:
        block, chance, random = response.logits, self._turns.chance, self._turns.random
        if block is None:
            return "a raw step came without logits"
        hold = chance(0.2)
        # What is held is compared again later, and then any difference must have come meanwhile.
        whole = hold or chance(0.125)
        self.tally.patterns_checked += len(expected) if whole else 0
        fault = self._check.fault(block.data, expected, whole=whole)
        if fault is None and hold:
            turns = random.randint(1, 25)
            if chance(0.5):
                self.tally.leases_held += self._held.hold(block, expected, turns)
            else:
                # A slice alone must keep its rows, long after the block it was cut from is gone.
                k = random.randrange(len(expected))
                self.tally.leases_held += self._held.hold(block.data[k : k + 1], expected[k : k + 1], turns)
        return fault

    def _accept(self, flight: Flight, response: Response) -> None:
        """Go on after the drafted tokens that the answers confirm, as a caller that speculates does."""
        answers = response.tokens if response.logits is None else response.logits.data.argmax(axis=1)
        drafted = flight.part.tokens[1:]
        differing = np.flatnonzero(answers[:-1] != drafted)
        accepted = int(differing[0]) if len(differing) else len(drafted)
        self.tally.drafts_accepted += accepted
        self._go_on_at = min(flight.start + 1 + accepted, len(self._mirror))

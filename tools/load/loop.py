"""One closed loop: a session that submits, waits, checks what came, and submits again."""

from __future__ import annotations

import time

import numpy as np

from shmsched import (
    Full,
    InvalidRequest,
    OutputRows,
    Request,
    RequestParams,
    Response,
    SamplingParams,
    Session,
    SessionClosed,
    ShmschedError,
)
from shmsched.tools.load.answers import I64, Mirror
from shmsched.tools.load.flight import Flight, Shared
from shmsched.tools.load.options import MODEL
from shmsched.tools.load.turns import Choices, Part

GREEDY = SamplingParams()
OPEN_S = 0.5
ROOM_S = 5.0
STARVED = 1000


class ClosedLoop:
    """Opens a session, uses it up, closes it, opens the next."""

    def __init__(self, shared: Shared, choices: Choices, vocab: int, max_chunk: int, max_tokens: int) -> None:
        self._shared = shared
        self._tally = shared.tally
        self._choices = choices
        self._random = choices.random
        self._vocab = vocab
        self._max_chunk = max_chunk
        self._max_tokens = max_tokens
        self._session: Session | None = None
        self._mirror = Mirror(vocab)
        self._go_on_at = 0
        self._starved = 0
        self.flights: list[Flight] = []

    @property
    def idle(self) -> bool:
        return not any(flight.counts for flight in self.flights)

    # --- submitting -----------------------------------------------------------------------------------------------------

    def take_turn(self) -> None:
        """Submit something. Raises Full if there was no room for all of it, and other errors of the client."""
        session = self._session
        if session is not None:
            if not self.flights and session.position != self._mirror.length and session.ended is None:
                self._tally.say_wrong(
                    f"session {session.session_id} stands at position {session.position}, not {self._mirror.length}"
                )
                self.close()
            elif self._mirror.length + self._choices.most_tokens > self._max_tokens or self._choices.session_ends():
                self.close()
        session = self._session or self._open()
        turn = self._choices.turn(self._mirror, self._go_on_at)
        made = [self._submit(session, part) for part in turn.parts]
        if turn.cancel is not None:
            if turn.cancel_later:
                self._shared.to_cancel.append(made[turn.cancel])
            else:
                self.cancel(made[turn.cancel])
        if turn.close:
            self.close()

    def _open(self) -> Session:
        client = self._shared.client
        block = self._random.random() < 0.5
        try:
            session = client.open_session(model=MODEL, block=block, timeout=OPEN_S)
        except Full:
            self._tally.full += 1
            raise
        self._tally.sessions_opened += 1
        self._session = session
        self._mirror = Mirror(self._vocab)
        self._go_on_at = 0
        return session

    def _submit(self, session: Session, part: Part) -> Flight:
        shared, tally, mirror = self._shared, self._tally, self._mirror
        position = self._go_on_at
        if part.rewind is not None:
            position = int(position * part.rewind)
        rewinds = position < mirror.length
        hashes = mirror.foresee(position, part.tokens)
        wanted = {OutputRows.NONE: hashes[:0], OutputRows.LAST: hashes[-1:], OutputRows.ALL: hashes}[part.rows]
        n = len(part.tokens)
        steps = -(-n // self._max_chunk)
        request_id = None
        if part.as_request:
            request_id, shared.next_request = shared.next_request, shared.next_request + 1
        flight = Flight(
            self, session, part, position, steps, mirror.answers(wanted), request_id, shared.landings,
            time.perf_counter_ns(),
        )  # fmt: skip
        sampling = None if part.raw else GREEDY
        try:
            if request_id is not None:
                params = RequestParams(position, sampling, part.rows)
                request = Request(request_id, session.session_id, part.tokens, params)
                future = shared.client.submit(request, block=part.block, block_timeout=ROOM_S)
            else:
                future = session.submit(
                    part.tokens, position=position if rewinds else None, sampling=sampling, output_rows=part.rows,
                    block=part.block, block_timeout=ROOM_S,
                )  # fmt: skip
        except Full:
            tally.full += 1
            raise
        self._starved = 0
        mirror.commit(position, hashes)
        self._go_on_at = mirror.length
        tally.sent += steps
        tally.rewinds += rewinds
        tally.pipelined += not self.idle
        flight.future = future
        self.flights.append(flight)
        future.add_done_callback(flight.land)
        return flight

    def cancel(self, flight: Flight) -> None:
        """Cancel it, if it is not answered yet."""
        future, tally = flight.future, self._tally
        if future is None or not flight.counts:
            return
        # The callback runs in here, and with it what this thread must know of the flight.
        flight.may_cancel = True
        if not future.cancel():
            flight.may_cancel = False
            tally.cancels_late += 1
            return
        tally.cancels += 1
        later = self.flights[self.flights.index(flight) :]
        for other in later:
            other.may_cancel = True
        # None of them counts as having run, so the session holds what was there before the one that reached back furthest.
        self._mirror.rewind(min(other.start for other in later))
        self._go_on_at = self._mirror.length

    def starves(self, *, quiet: bool) -> bool:
        """After a Full: whether that came too often while nothing was outstanding or held, so that something is lost.

        A session slot may be missing for ever, since others may have them all.
        """
        self._starved = self._starved + 1 if quiet and self._session is not None else 0
        return self._starved >= STARVED

    def close(self) -> None:
        """Close the session, with whatever is outstanding."""
        session, self._session = self._session, None
        if session is None:
            return
        for flight in self.flights:
            flight.may_close = True
        session.close()
        self._tally.sessions_closed += 1

    # --- what came ------------------------------------------------------------------------------------------------------

    def landed(self, flight: Flight) -> None:
        """Look at what became of a submission."""
        future, tally = flight.future, self._tally
        assert future is not None
        # The future and the flight refer to each other: unless that ends here, its rows wait for the garbage collector.
        flight.future = None
        self.flights.remove(flight)
        if future.cancelled():
            if flight.may_cancel:
                tally.cancelled += flight.steps
            else:
                self._failed(flight, InvalidRequest("cancelled, though nobody asked"))
            return
        error = future.exception()
        if error is None:
            self._shared.pulse.beat()
            tally.completed += flight.steps
            tally.tokens += len(flight.part.tokens)
            tally.latency.add((flight.answered_ns - flight.submitted_ns) / 1000)
            self._check(flight, future.result())
        elif flight.may_close and isinstance(error, SessionClosed):
            tally.closed += flight.steps
        else:
            self._failed(flight, error)

    def _failed(self, flight: Flight, error: BaseException) -> None:
        self._shared.say_failed(error, flight.steps, str(flight))
        if flight.session is self._session:
            # Whatever it holds now, the next one starts from nothing and can be checked.
            self.close()

    def refused(self, error: ShmschedError) -> None:
        """A call raised what it should not have."""
        session = self._session
        if isinstance(error, SessionClosed) and session is not None and session.ended is not None:
            # Submitted by its number alone, a session that is lost is no longer known; why it was lost says more.
            error = session.ended
        self._shared.say_failed(error, 1, "a call" if session is None else f"session {session.session_id}, a call")
        self.close()

    def _check(self, flight: Flight, response: Response) -> None:
        fault = self._fault(flight, response)
        if fault is not None:
            self._tally.say_wrong(f"{flight}: {fault}")
        elif flight.part.draft and flight.session is self._session and flight.counts:
            self._accept(flight, response)

    def _fault(self, flight: Flight, response: Response) -> str | None:
        expected, tally = flight.expected, self._tally
        if response.session_id != flight.session.session_id:
            return f"the answer names session {response.session_id}"
        if flight.request_id is not None and response.request_id != flight.request_id:
            return f"the answer names request {response.request_id}, not {flight.request_id}"
        tally.rows_checked += len(expected)
        if not flight.part.raw:
            tokens = response.tokens
            if tokens.dtype != np.int64 or tokens.shape != expected.shape:
                return f"tokens are {tokens.dtype} {tokens.shape}, not int64 {expected.shape}"
            if not np.array_equal(tokens, expected):
                k = int(np.flatnonzero(tokens != expected)[0])
                return f"row {k} has token {tokens[k]}, not {expected[k]}"
            if response.logprobs is None or response.logprobs.shape != expected.shape:
                return "the log-probabilities are not one for each token"
            return None
        if len(expected) == 0:
            return None
        block = response.logits
        if block is None:
            return "a raw step came without logits"
        hold = self._random.random() < 0.2
        # What is held is compared again later, and then any difference must have come meanwhile.
        whole = hold or self._random.random() < 0.125
        tally.patterns_checked += len(expected) if whole else 0
        fault = self._shared.check.fault(block.data, expected, whole=whole)
        if fault is None and hold:
            tally.leases_held += self._hold(response, expected)
        return fault

    def _hold(self, response: Response, expected: I64) -> bool:
        block = response.logits
        assert block is not None
        turns = self._random.randint(1, 200)
        if self._random.random() < 0.5:
            return self._shared.held.hold(block, expected, turns)
        # A slice alone must keep its rows, long after the block it was cut from is gone.
        k = self._random.randrange(len(expected))
        return self._shared.held.hold(block.data[k : k + 1], expected[k : k + 1], turns)

    def _accept(self, flight: Flight, response: Response) -> None:
        """Go on after the drafted tokens that the answers confirm, as a caller that speculates does."""
        answers = response.tokens if response.logits is None else response.logits.data.argmax(axis=1)
        drafted = flight.part.tokens[1:]
        differing = np.flatnonzero(answers[:-1] != drafted)
        accepted = int(differing[0]) if len(differing) else len(drafted)
        self._tally.drafts_accepted += accepted
        self._go_on_at = min(flight.start + 1 + accepted, self._mirror.length)

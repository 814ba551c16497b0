"""Where a session goes on, through failures, rewinds and cancels that its client learns of late (rule 9)."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmsched.client.models import Model
from shmsched.client.session import Session
from shmsched.dataplane.session_core import closed_error
from shmsched.engine.contract import EngineInfo
from shmsched.errors import SessionClosed, SessionLost

MODEL = Model(
    EngineInfo(model="m", vocab_size=10, max_sessions=1, max_session_tokens=1000, max_prefill_chunk_size=10), 1, True
)


def session() -> Session:
    return Session(None, 1, MODEL, 1, 0)  # type: ignore[arg-type]


class Step(NamedTuple):
    request: int
    start: int
    end: int


class Cancel(NamedTuple):
    request: int
    position: int


class Positions(RuleBasedStateMachine):
    """The scheduler's side in a few lines, with what is on its way to it and from it.

    What the position must be follows from what happened: a step that ran ends where it ends; one that did not leaves the
    session at most where it starts; a cancel leaves it at most at its position.
    """

    def __init__(self) -> None:
        super().__init__()
        self.session = session()
        self.next_request = 1
        self.log: list[Step | Cancel] = []
        self.ran: set[int] = set()
        self.submissions: list[tuple[int, int, int]] = []
        self.to_scheduler: deque[Step | Cancel] = deque()
        self.to_client: deque[tuple[Step, bool]] = deque()
        self.unanswered: set[int] = set()
        self.outstanding: list[Step] = []
        self.next_position = 0

    def plain(self) -> int:
        position = 0
        for entry in self.log:
            if isinstance(entry, Cancel):
                position = min(position, entry.position)
            elif entry.request in self.ran:
                position = entry.end
            else:
                position = min(position, entry.start)
        return position

    # --- the client ---

    @rule(chunks=st.lists(st.integers(1, 3), min_size=1, max_size=3), back=st.integers(0, 5))
    def submit(self, chunks: list[int], back: int) -> None:
        start = max(0, self.session.position - back) if back < 4 else self.session.position
        first, at = self.next_request, start
        for n in chunks:
            step = Step(self.next_request, at, at + n)
            self.log.append(step)
            self.to_scheduler.append(step)
            self.unanswered.add(step.request)
            self.next_request += 1
            at += n
        self.session.submitted(first, start, bytes(4 * (at - start)))
        self.submissions.append((first, self.next_request - 1, start))
        assert self.session.position == at

    @precondition(lambda self: self.submissions)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        first, last, start = data.draw(st.sampled_from(self.submissions))
        if last not in self.unanswered:
            return
        self.session.rewound(self.next_request, start)
        cancel = Cancel(first, start)
        self.log.append(cancel)
        self.to_scheduler.append(cancel)

    # --- the scheduler ---

    @precondition(lambda self: self.to_scheduler)
    @rule()
    def arrive(self) -> None:
        entry = self.to_scheduler.popleft()
        if isinstance(entry, Cancel):
            first = next((i for i, s in enumerate(self.outstanding) if s.request >= entry.request), None)
            self.fail_from(len(self.outstanding) if first is None else first, entry.position)
        elif entry.start > self.next_position:
            self.to_client.append((entry, False))
        else:
            self.next_position = entry.end
            self.outstanding.append(entry)

    @precondition(lambda self: self.outstanding)
    @rule()
    def run(self) -> None:
        step = self.outstanding.pop(0)
        self.ran.add(step.request)
        self.to_client.append((step, True))

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.outstanding) - 1))
        self.fail_from(i, self.outstanding[i].start)

    def fail_from(self, i: int, position: int) -> None:
        starts = [step.start for step in self.outstanding[i:]]
        self.next_position = min(self.next_position, position, *starts)
        self.to_client.extend((step, False) for step in self.outstanding[i:])
        del self.outstanding[i:]

    # --- the client again ---

    @precondition(lambda self: self.to_client)
    @rule()
    def hear(self) -> None:
        step, ran = self.to_client.popleft()
        self.unanswered.discard(step.request)
        if not ran:
            self.session.step_failed(step.request, step.start)

    @rule()
    def everything_arrives(self) -> None:
        while self.to_scheduler:
            self.arrive()
        while self.outstanding:
            self.run()
        while self.to_client:
            self.hear()

    @invariant()
    def when_all_is_quiet_both_sides_agree(self) -> None:
        if self.to_scheduler or self.outstanding or self.to_client:
            return
        assert self.session.position == self.plain()
        assert self.session.position <= self.next_position, "the next step would be refused for leaving a gap"


Positions.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPositions = Positions.TestCase


def test_cancelling_one_future_after_the_other_goes_back_to_the_first() -> None:
    s = session()
    s.submitted(1, 0, bytes(4 * 4))
    s.submitted(2, 4, bytes(4 * 1))
    s.rewound(3, 0)
    s.rewound(3, 4)
    assert s.position == 0


def test_a_refusal_that_is_heard_after_going_back_changes_nothing() -> None:
    """Request 2 was on its way when 1 failed; its refusal comes when the session has gone on from before both."""
    s = session()
    s.submitted(1, 0, bytes(4 * 1))
    s.submitted(2, 1, bytes(4 * 1))
    s.step_failed(1, 0)
    s.submitted(3, 0, bytes(4 * 5))
    s.step_failed(2, 1)
    assert s.position == 5


def test_a_failure_takes_the_later_ones_with_it() -> None:
    s = session()
    s.submitted(1, 0, bytes(4 * 4))
    s.submitted(2, 4, bytes(4 * 1))
    s.submitted(3, 5, bytes(4 * 1))
    s.step_failed(2, 4)
    s.step_failed(3, 5)
    assert s.position == 4


def test_a_failure_that_is_heard_after_a_rewind_below_it_changes_nothing() -> None:
    s = session()
    s.submitted(1, 0, bytes(4 * 4))
    s.submitted(2, 4, bytes(4 * 4))
    s.submitted(3, 1, bytes(4 * 8))
    s.step_failed(2, 4)
    assert s.position == 9


def test_rewinds_are_remembered_in_bounded_room() -> None:
    s = session()
    for request in range(1, 3000):
        start = s.position if request % 2 else max(0, s.position - 1)
        s.submitted(request, start, bytes(4 * (s.position + 2 - start)))
    assert len(s._rewinds) <= 64


def test_a_session_that_ended_says_how_each_time_anew() -> None:
    s = session()
    s.check_open()
    s.ended = SessionLost("engine 3 died")
    errors = []
    for _ in range(2):
        with pytest.raises(SessionLost, match="engine 3 died") as e:
            s.check_open()
        errors.append(e.value)
    assert errors[0] is not errors[1], "an error that is raised twice gathers tracebacks"
    s.ended = closed_error(7)
    with pytest.raises(SessionClosed, match="session 7 is closed"):
        s.check_open()

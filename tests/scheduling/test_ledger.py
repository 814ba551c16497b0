"""Of a batch those steps are completed that were done, in their order, and no step twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shmsched.dataplane.ledger import Ledger
from shmsched.dataplane.step import QueuedStep, StepState

DONE, DEFERRED = 1, 2


@given(st.lists(st.sampled_from(["complete", "fail", "cancel", "requeue", "deferred", ""]), max_size=6))
def test_a_batch_is_completed_up_to_the_first_step_that_was_not_done_or_is_not_in_flight(meanwhile: list[str]) -> None:
    ledger, steps = Ledger(), [QueuedStep(n, 1, 1) for n in range(len(meanwhile))]
    statuses = bytes([DEFERRED if what == "deferred" else DONE for what in meanwhile])
    ledger.enter_many(len(steps))
    ledger.dispatch(steps)
    for step, what in zip(steps, meanwhile, strict=True):
        if what not in ("", "deferred"):
            assert getattr(ledger, what)(step)
    before, states = ledger.counts(), [step.state for step in steps]
    assert before.balanced
    at, completed = 0, 0
    while at < len(steps):
        stop = ledger.complete_run(steps, statuses, at, DONE)
        expected = next((k for k in range(at, len(steps)) if meanwhile[k]), len(steps))
        assert stop == expected
        completed += stop - at
        at = stop + 1
    assert ledger.counts().completed == before.completed + completed
    assert ledger.counts().balanced
    for step, state, what in zip(steps, states, meanwhile, strict=True):
        assert step.state is (state if what else StepState.COMPLETED)
    assert ledger.complete_run(steps, statuses, 0, DONE) == 0

"""A batch is completed as a whole or not at all, and no step twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shmsched.dataplane.ledger import Ledger
from shmsched.dataplane.step import QueuedStep, StepState


@given(st.lists(st.sampled_from(["complete", "fail", "cancel", "requeue", ""]), max_size=6))
def test_a_batch_is_completed_as_a_whole_or_not_at_all(meanwhile: list[str]) -> None:
    ledger, steps = Ledger(), [QueuedStep(n, 1, 1) for n in range(len(meanwhile))]
    ledger.enter_many(len(steps))
    ledger.dispatch(steps)
    for step, what in zip(steps, meanwhile, strict=True):
        if what:
            assert getattr(ledger, what)(step)
    before, states = ledger.counts(), [step.state for step in steps]
    assert before.balanced
    assert ledger.complete_all(steps) is not any(meanwhile)
    if any(meanwhile):
        assert (ledger.counts(), [step.state for step in steps]) == (before, states)
    else:
        assert ledger.counts().completed == len(steps)
        assert all(step.state is StepState.COMPLETED for step in steps)
        assert not steps or not ledger.complete_all(steps)
    assert ledger.counts().balanced

"""The daemon under arbitrary sequences of frames from clients, engines and others: hypothesis chooses, and shrinks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fuzz import actions
from fuzz.choices import DrawnChoices
from fuzz.liars import LyingClient, LyingEngine
from support.world import World

pytestmark = pytest.mark.usefixtures("no_leftovers")


@pytest.fixture
def world() -> Iterator[World]:
    world = actions.lying_world()
    yield world
    world.close()


class Peers(RuleBasedStateMachine):
    """One of its runs: it begins and ends with nobody connected."""

    world: ClassVar[World]

    @initialize()
    def begin(self) -> None:
        self.world.begin()

    def _do(self, action: actions.Action, data: st.DataObject) -> None:
        action(self.world, DrawnChoices(data))
        self.world.turn()

    @rule(data=st.data())
    def somebody_comes(self, data: st.DataObject) -> None:
        come = (actions.client_connects, actions.engine_connects, actions.control_asks, actions.stranger_connects)
        self._do(data.draw(st.sampled_from(come)), data)

    @rule(data=st.data())
    def somebody_leaves(self, data: st.DataObject) -> None:
        self._do(actions.someone_leaves, data)

    @rule(data=st.data())
    def somebody_says_anything(self, data: st.DataObject) -> None:
        self._do(actions.someone_says_anything, data)

    @rule(data=st.data())
    def someone_reads_or_does_not(self, data: st.DataObject) -> None:
        self._do(actions.someone_reads_or_does_not, data)

    @rule(data=st.data())
    def time_passes(self, data: st.DataObject) -> None:
        self._do(actions.time_passes, data)

    @rule(data=st.data())
    def a_client_submits(self, data: st.DataObject) -> None:
        self._do(actions.SUBMIT, data)

    @rule(data=st.data())
    def a_client_opens_or_closes(self, data: st.DataObject) -> None:
        does = (LyingClient.open_session, LyingClient.fork_session, LyingClient.close_session, LyingClient.open_arena)
        self._do(actions.a_client(data.draw(st.sampled_from(does))), data)

    @rule(data=st.data())
    def a_client_ends_or_reads(self, data: st.DataObject) -> None:
        does = (LyingClient.cancel, LyingClient.halt, LyingClient.consumed, LyingClient.scribble)
        self._do(actions.a_client(data.draw(st.sampled_from(does))), data)

    @rule(data=st.data())
    def an_engine_answers_a_batch(self, data: st.DataObject) -> None:
        does = (LyingEngine.answer_any, LyingEngine.answer_any, LyingEngine.defer_all, LyingEngine.scribble)
        self._do(actions.an_engine(data.draw(st.sampled_from(does))), data)

    @rule(data=st.data())
    def an_engine_answers_an_opening(self, data: st.DataObject) -> None:
        does = (LyingEngine.answer_opening, LyingEngine.start, LyingEngine.offer)
        self._do(actions.an_engine(data.draw(st.sampled_from(does))), data)

    @invariant()
    def all_is_right(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.everybody_leaves()


def test_no_sequence_of_frames_makes_the_daemon_err_or_lose_count(world: World) -> None:
    class OnThisWorld(Peers):
        pass

    OnThisWorld.world = world
    run_state_machine_as_test(
        OnThisWorld,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    world.nothing_is_kept()

"""Every way of generating gives the tokens of a plain loop, and leaves the session where its caller knows it to be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_runner import VOCAB, Losses, PlainSession, Runner, course_on, reference

from shmsched.client.generation.course import Course, FinishReason
from shmsched.client.generation.drafting import Draft, PromptLookup
from shmsched.client.generation.effects import Effect, Plan, Reopen, TokenArray
from shmsched.client.generation.replay import MOST_IN_A_ROW, replaying
from shmsched.client.generation.speculative import speculating
from shmsched.client.generation.stepping import continuing, processing, stepping
from shmsched.client.generation.stop_text import TextGate
from shmsched.client.generation.text_stream import TextStream
from shmsched.errors import EngineDied, EngineError, EngineTimeout, InvalidRequest, SessionLost, StepFailed
from shmsched.params import GREEDY, SamplingParams

MakePlan = Callable[[Course], Plan[None]]


class Guesses:
    """Drafts what it is told to, right or wrong."""

    def __init__(self, guesses: list[list[int]]) -> None:
        self._guesses = guesses

    def draft(self, tokens: TokenArray, n: int) -> Draft:
        self._guesses = [*self._guesses[1:], self._guesses[0]]
        return Draft(self._guesses[-1])


class Oracle:
    """Is always right."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling

    def draft(self, tokens: TokenArray, n: int) -> Draft:
        return Draft(reference(tokens.tolist(), min(n, 4), self._sampling))


samplings = st.sampled_from([GREEDY, SamplingParams(1.0, seed=3), SamplingParams(0.7, 0.9, 3, seed=4)])
token = st.integers(0, VOCAB - 1)
prompts = st.lists(token, min_size=1, max_size=6)


def ways(sampling: SamplingParams, guesses: list[list[int]]) -> dict[str, MakePlan]:
    return {
        "stepping": stepping,
        "continuing": continuing,
        "processing": lambda course: processing(course, lambda tokens, row: row),
        "lookup": lambda course: speculating(course, PromptLookup(2, 3), 8, VOCAB),
        "oracle": lambda course: speculating(course, Oracle(sampling), 8, VOCAB),
        "guesses": lambda course: speculating(course, Guesses(guesses), 4, VOCAB),
    }


WAYS = list(ways(GREEDY, []))
way_names = st.sampled_from(WAYS)
guesses = st.lists(st.lists(token, max_size=6), min_size=1, max_size=4)


def expected(prompt: list[int], most: int, sampling: SamplingParams, stops: list[int]) -> tuple[list[int], list[int]]:
    """What is given, and what is sampled."""
    sampled = reference(prompt, most, sampling)
    for i, t in enumerate(sampled):
        if t in stops:
            return sampled[:i], sampled[: i + 1]
    return sampled, sampled


@given(way_names, prompts, st.integers(1, 20), samplings, st.lists(token, max_size=1), guesses)
def test_every_way_gives_the_tokens_of_a_plain_loop(
    way: str, prompt: list[int], most: int, sampling: SamplingParams, stops: list[int], guesses: list[list[int]]
) -> None:
    session = PlainSession()
    course = course_on(session, prompt, most, sampling=sampling, stop_tokens=stops)
    given_tokens, sampled = expected(prompt, most, sampling, stops)
    assert Runner(session, course, ways(sampling, guesses)[way](course)).run() == given_tokens
    assert course.given == given_tokens
    assert course.finish_reason is (FinishReason.STOP if sampled != given_tokens else FinishReason.LENGTH)
    assert session.held[: session.position] == [*prompt, *sampled[:-1]]
    assert session.unfed == sampled[-1]


@given(
    way_names,
    way_names,
    prompts,
    st.integers(1, 12),
    st.lists(token, max_size=3),
    st.integers(1, 12),
    samplings,
    guesses,
)
def test_a_second_generation_feeds_the_token_that_the_first_left(
    way: str, other: str, prompt: list[int], first: int, between: list[int], second: int,
    sampling: SamplingParams, guesses: list[list[int]],
) -> None:  # fmt: skip
    session = PlainSession()
    course = course_on(session, prompt, first, sampling=sampling)
    tokens = Runner(session, course, ways(sampling, guesses)[way](course)).run()
    course = course_on(session, between, second, sampling=sampling)
    more = Runner(session, course, ways(sampling, guesses)[other](course)).run()
    assert more == reference([*prompt, *tokens, *between], second, sampling)


@given(way_names, prompts, st.integers(1, 15), st.data(), samplings, guesses)
def test_leaving_undoes_what_was_not_given(
    way: str, prompt: list[int], most: int, data: st.DataObject, sampling: SamplingParams, guesses: list[list[int]]
) -> None:
    left_after = data.draw(st.integers(1, most))
    session = PlainSession()
    course = course_on(session, prompt, most, sampling=sampling)
    whole = reference(prompt, most + 5, sampling)
    assert Runner(session, course, ways(sampling, guesses)[way](course)).run(left_after) == whole[:left_after]
    assert session.held[: session.position] == [*prompt, *whole[: left_after - 1]]
    assert session.unfed == whole[left_after - 1]
    assert course.given == whole[:left_after]
    # Who has been given all of it has not cut it short.
    assert (course.finish_reason is FinishReason.LENGTH) == (left_after == most)
    course = course_on(session, [], 5, sampling=sampling)
    assert Runner(session, course, stepping(course)).run() == whole[left_after : left_after + 5]


@given(st.sampled_from(["stepping", "continuing"]), prompts, st.integers(1, 10), st.data())
def test_what_cannot_be_undone_counts_as_given(way: str, prompt: list[int], most: int, data: st.DataObject) -> None:
    session = PlainSession(can_rewind=False)
    course = course_on(session, prompt, most)
    left_after = data.draw(st.integers(1, most))
    whole = reference(prompt, most + 5)
    Runner(session, course, ways(GREEDY, [])[way](course)).run(left_after)
    kept = course.given
    assert kept == whole[: len(kept)]
    assert len(kept) >= left_after
    assert session.held == [*prompt, *kept[:-1]]
    assert session.unfed == kept[-1]
    course = course_on(session, [], 5)
    assert Runner(session, course, stepping(course)).run() == whole[len(kept) : len(kept) + 5]


@given(
    way_names, prompts, st.integers(1, 12), st.sets(st.integers(1, 40), max_size=4), st.booleans(), samplings, guesses
)
def test_replay_costs_no_token_and_repeats_none(
    way: str, prompt: list[int], most: int, at: set[int], second: bool, sampling: SamplingParams, guesses: list[list[int]]
) -> None:  # fmt: skip
    session = PlainSession()
    before: list[int] = []
    if second:
        course = course_on(session, [1, 2], 3, sampling=sampling)
        before = [1, 2, *Runner(session, course, stepping(course)).run()]
    course = course_on(session, prompt, most, sampling=sampling)
    losses = Losses(session, at)
    plan = replaying(course, ways(sampling, guesses)[way])
    whole = reference([*before, *prompt], most, sampling)
    try:
        assert Runner(session, course, plan, losses).run() == whole
    except SessionLost:
        assert losses.happened > MOST_IN_A_ROW
        return
    assert session.held[: session.position] == [*before, *prompt, *whole[:-1]]


def test_what_had_come_is_given_before_another_session_is_waited_for() -> None:
    session = PlainSession()
    course = course_on(session, [1], 6)
    # The third effect is the second step: the first token has come then, and was not given yet.
    losses = Losses(session, {3})
    given_by_then = []

    class Watching(Runner):
        def perform(self, effect: Effect) -> object:
            if isinstance(effect, Reopen):
                given_by_then.append(list(self.given))
            return super().perform(effect)

    assert Watching(session, course, replaying(course, stepping), losses).run() == reference([1], 6)
    assert given_by_then == [reference([1], 1)]


@pytest.mark.parametrize("kind", [SessionLost, EngineDied, EngineTimeout, EngineError])
def test_every_loss_of_an_engine_is_replayed(kind: type[Exception]) -> None:
    session = PlainSession()
    course = course_on(session, [1], 6)
    n = 0

    def meet() -> None:
        nonlocal n
        n += 1
        if n == 4:
            raise kind("lost")

    assert Runner(session, course, replaying(course, stepping), meet).run() == reference([1], 6)


def test_a_prompt_that_kills_every_engine_ends_the_replays() -> None:
    session = PlainSession()
    course = course_on(session, [1], 6)
    losses = Losses(session, set(range(1, 1000)))
    with pytest.raises(SessionLost):
        Runner(session, course, replaying(course, stepping), losses).run()
    assert losses.n < 20


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_fails_is_given_to_the_caller_and_the_session_goes_on(way: str) -> None:
    session = PlainSession()
    course = course_on(session, [1, 2], 9)
    n = 0

    def meet() -> None:
        nonlocal n
        n += 1
        if n == 5:
            raise StepFailed("no")

    runner = Runner(session, course, ways(GREEDY, [[0]])[way](course), meet)
    with pytest.raises(StepFailed, match="no"):
        runner.run()
    whole = reference([1, 2], 15)
    assert runner.given == whole[: len(runner.given)]
    course = course_on(session, [], 5)
    assert Runner(session, course, stepping(course)).run() == whole[len(runner.given) :][:5]


def test_drafts_that_are_right_save_steps() -> None:
    plain, spoken = PlainSession(), PlainSession()
    course = course_on(plain, [1, 2], 40)
    Runner(plain, course, stepping(course)).run()
    course = course_on(spoken, [1, 2], 40)
    Runner(spoken, course, speculating(course, PromptLookup(2, 8), 16, VOCAB)).run()
    assert plain.steps == 40
    assert spoken.steps < 20, "the model repeats itself, and looking up what it said before saves nothing"


def test_the_processor_decides_and_sees_what_was_sampled() -> None:
    seen = []

    def odd_only(tokens: object, row: np.ndarray) -> np.ndarray:
        seen.append(list(tokens))  # type: ignore[call-overload]
        assert not row.flags.writeable
        return np.where(np.arange(VOCAB) % 2 == 1, row, np.float32(-np.inf))

    session = PlainSession()
    course = course_on(session, [1], 8, sampling=SamplingParams(2.0, seed=1))
    tokens = Runner(session, course, processing(course, odd_only)).run()
    assert set(tokens) == {1, 3}
    assert seen == [tokens[:i] for i in range(8)]


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda tokens, row: np.full(VOCAB, -np.inf, np.float32), "left no token to sample after 0 tokens"),
        (lambda tokens, row: row * np.nan, "left no token"),
        (lambda tokens, row: row[:2], r"float32 \(2,\); a row of floats of shape \(5,\) is wanted"),
        (lambda tokens, row: row > 0, "bool"),
    ],
)
def test_a_row_that_cannot_be_sampled_from_is_refused(processor: Callable[..., np.ndarray], message: str) -> None:
    session = PlainSession()
    course = course_on(session, [1], 8)
    with pytest.raises(InvalidRequest, match=message):
        Runner(session, course, processing(course, processor)).run()
    assert (session.position, session.unfed) == (0, None)


stop_lists = st.lists(st.sampled_from(["a", "b", "ab", "ba", "é"]), min_size=1, max_size=2)


@given(stop_lists, st.sampled_from(["stepping", "continuing", "oracle"]))
def test_a_stop_text_ends_every_way_at_the_same_place(stops: list[str], way: str) -> None:
    pieces = [b"a", b"b", b"\xc3", b"\xa9", b"ab"]
    prompt, most = [1, 2], 20

    def decode(tokens: object) -> str:
        return b"".join(pieces[int(t)] for t in tokens).decode(errors="replace")  # type: ignore[attr-defined]

    whole = reference(prompt, most)
    text = decode(whole)
    cut = min([text.find(s) for s in stops if s in text], default=len(text))
    session = PlainSession()
    gate = TextGate(TextStream(decode), stops)
    course = course_on(session, prompt, most, gate=gate)
    given_tokens = Runner(session, course, ways(GREEDY, [])[way](course)).run()
    assert given_tokens == whole[: len(given_tokens)]
    if cut < len(text):
        assert course.text == text[:cut]
    else:
        assert course.held is not None
        assert text.removesuffix("\ufffd") == (course.text + course.held).removesuffix("\ufffd")
    assert session.held[: session.position] == [*prompt, *course.sampled[:-1]]
    if cut < len(text):
        assert course.finish_reason is FinishReason.STOP
        assert len(course.sampled) < most or course.sampled == whole

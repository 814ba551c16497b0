"""Logits from which no token can be drawn fail their step, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import shmsched
from shmsched.client.generation import Draft, EngineDraft, PromptLookup
from shmsched.params import OutputRows

from processes.engines import Spoiled
from processes.reading import drain
from processes.ways import ENGINES

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
DEADLINE = 30.0
SICK = 25
"""Behind this token the model's logits are NaN."""
SPOILED = f"{ENGINES}:Spoiled"
FAULTS = {
    Spoiled.NAN: "NaN at index 3 of 40",
    Spoiled.INF: r"\+inf at index 7 of 40 and 1 more",
    Spoiled.NOTHING: "-inf at every index of 40",
}
SAMPLED = [shmsched.SamplingParams(), shmsched.SamplingParams(0.7, 0.9, 5, seed=3), shmsched.SamplingParams(1.0)]


@pytest.fixture(scope="module", params=["rows", "put_logits"])
def client(request: pytest.FixtureRequest) -> Iterator[shmsched.Client]:
    spec = f"{SPOILED}?put={request.param == 'put_logits'}"
    with pytest.MonkeyPatch.context() as environment:
        # A warning of numpy's in the engine fails its batch.
        environment.setenv("PYTHONWARNINGS", "error::RuntimeWarning")
        with (
            shmsched.launch(
                f"{spec}&step_us=2000&sick={SICK}", f"{spec}&model=small&sick=7", max_prefill_chunk_size=16
            ) as cluster,
            cluster.client() as client,
        ):
            yield client


@pytest.fixture
def session(client: shmsched.Client) -> Iterator[shmsched.Session]:
    with client.open_session(model="spoiled", seed=1) as session:
        yield session


def tokens(future: shmsched.StepFuture) -> list[int]:
    found: list[int] = future.result(DEADLINE).tokens.tolist()
    return found


@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
@pytest.mark.parametrize("token", FAULTS)
def test_the_step_fails_in_words_and_its_session_goes_on(
    session: shmsched.Session, token: int, sampling: shmsched.SamplingParams
) -> None:
    assert tokens(session.submit([4, 7], sampling=sampling)) == [8]
    failed, later = session.submit([1, token], sampling=sampling), session.submit([2], sampling=sampling)
    with pytest.raises(
        shmsched.StepFailed,
        match=f"failed the step at position 2 of session {session.session_id}: row 0 of its logits, for position 3, has"
        f" {FAULTS[token]}$",
    ):
        failed.result(DEADLINE)
    with pytest.raises(shmsched.StepError):
        later.result(DEADLINE)
    assert session.position == 2
    assert tokens(session.submit([9], sampling=sampling)) == [10]
    assert session.position == 3


@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
def test_the_others_in_its_batch_get_their_answers(client: shmsched.Client, sampling: shmsched.SamplingParams) -> None:
    sessions = [client.open_session(model="spoiled", seed=i) for i in range(12)]
    fed = [1, Spoiled.NAN, Spoiled.MASKED, 2, Spoiled.INF, Spoiled.HUGE, Spoiled.NOTHING, 28, 3, Spoiled.NAN, 5, 6]
    given = {t: (t + 1) % 30 for t in range(30)} | {Spoiled.MASKED: 5, Spoiled.HUGE: 9}
    for _ in range(5):
        futures = [s.submit([t], sampling=sampling, position=0) for s, t in zip(sessions, fed, strict=True)]
        for future, token in zip(futures, fed, strict=True):
            if token in FAULTS:
                assert isinstance(future.exception(DEADLINE), shmsched.StepFailed)
                continue
            response = future.result(DEADLINE)
            assert response.logprobs is not None
            assert response.tokens.tolist() == [given[token]]
            assert response.logprobs.tolist() == pytest.approx([0.0], abs=1e-6)
    for session in sessions:
        session.close()


def test_raw_logits_are_handed_on_as_they_are(session: shmsched.Session) -> None:
    for token in (*FAULTS, Spoiled.MASKED, Spoiled.HUGE):
        response = session.submit([token], sampling=None).result(DEADLINE)
        assert response.logits is not None
        np.testing.assert_array_equal(response.logits.data[0], Spoiled.logits(token))


def test_of_many_rows_the_one_is_named(session: shmsched.Session) -> None:
    fed = [1, 2, 3, Spoiled.INF, 4, 5]
    session.submit([8, 8]).result(DEADLINE)
    with pytest.raises(
        shmsched.StepFailed, match=r"step at position 2 .* row 3 of its logits, for position 5, has \+inf"
    ):
        session.submit(fed, output_rows=OutputRows.ALL).result(DEADLINE)
    assert tokens(session.submit(fed[:3], output_rows=OutputRows.ALL)) == [2, 3, 4]


def test_a_chunk_that_only_fills_the_cache_may_hold_anything(session: shmsched.Session) -> None:
    assert tokens(session.submit([Spoiled.NAN] * 40 + [3])) == [4]


class Sure:
    """Drafts what comes next, as one who drew it from a distribution."""

    def draft(self, tokens: Sequence[int], n: int) -> Draft:
        guesses = [int(tokens[-1]) + 1 + i for i in range(min(n, 3))]
        return Draft(guesses, [np.eye(40)[guess] for guess in guesses])


WAYS: dict[str, dict[str, Any]] = {
    "continued": {},
    "client-driven": {"continuation": False},
    "processed": {"logits_processor": lambda sampled, row: row},
    "drafted": {"draft": PromptLookup()},
    "drawn drafts": {"draft": Sure(), "sampling": SAMPLED[1]},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_generation_ends_with_it_and_its_session_goes_on(session: shmsched.Session, way: dict[str, Any]) -> None:
    generation = session.generate([SICK - 5], max_new_tokens=20, **way)
    with pytest.raises(
        shmsched.StepFailed,
        match=rf"at position \d+ of session {session.session_id}( failed)?: row \d of its logits, for position 5, has NaN",
    ):
        list(generation)
    n = len(generation.tokens)
    assert generation.tokens == [SICK - 4, SICK - 3, SICK - 2, SICK - 1, SICK][:n]
    assert n >= 1
    assert (session.position, session.unfed) == (n, generation.tokens[-1])
    assert list(session.generate([10], max_new_tokens=3, **way)) == [11, 12, 13]


def test_a_draft_from_a_distribution_that_is_none_is_refused(session: shmsched.Session) -> None:
    class Wild:
        def draft(self, tokens: Sequence[int], n: int) -> Draft:
            whole = np.full(40, np.nan)
            whole[30] = 1.0
            return Draft([30], [whole])

    with pytest.raises(shmsched.InvalidRequest, match="distribution 0 of the draft, of token 30, adds up to nan"):
        list(session.generate([0], max_new_tokens=4, draft=Wild(), sampling=SAMPLED[1]))


@pytest.mark.parametrize("sampling", SAMPLED[:2], ids=str)
def test_a_drafter_whose_logits_are_none_leaves_the_text_as_it_is(
    client: shmsched.Client, session: shmsched.Session, sampling: shmsched.SamplingParams
) -> None:
    with client.open_session(model="small") as small:
        draft = EngineDraft(small)
        expected = [4, 5, 6, 7, 8, 9, 10, 11]
        assert list(session.generate([3], max_new_tokens=8, draft=draft, sampling=sampling)) == expected
        assert isinstance(draft.error, shmsched.StepFailed)
        assert f"session {small.session_id}" in str(draft.error)
        assert "row 0 of its logits, for position " in str(draft.error)
        assert "has NaN at index 3 of 40" in str(draft.error)


def test_a_processor_that_leaves_nothing_is_told_apart_from_an_engine_that_gives_nothing(
    session: shmsched.Session,
) -> None:
    def nothing(sampled: Sequence[int], row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.full_like(row, -np.inf)

    def only_7(sampled: Sequence[int], row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.where(np.arange(40) == 7, np.float32(0.0), np.float32(-np.inf))

    with pytest.raises(
        shmsched.InvalidRequest, match="the logits processor left no token .* -inf at every index of 40"
    ):
        list(session.generate([1], max_new_tokens=2, logits_processor=nothing))
    with pytest.raises(shmsched.StepFailed, match=f"has {FAULTS[Spoiled.NAN]}, and the logits processor left it so"):
        list(session.generate([Spoiled.NAN], max_new_tokens=2, logits_processor=lambda sampled, row: row))
    # What the processor makes of a row is what counts.
    assert list(session.generate([Spoiled.NAN], max_new_tokens=2, logits_processor=only_7)) == [7, 7]


def test_whoever_runs_ahead_beside_it_goes_on_right(client: shmsched.Client) -> None:
    others = [client.open_session(model="spoiled") for _ in range(3)]
    streams = [other.stream([i], further=20) for i, other in enumerate(others)]
    failing = client.open_session(model="spoiled")
    for _ in range(10):
        with pytest.raises(shmsched.StepFailed, match="has NaN"):
            failing.submit([1, Spoiled.NAN]).result(DEADLINE)
        assert tokens(failing.submit([1], position=0)) == [2]
        failing.submit([1], position=0).result(DEADLINE)
    assert [drain(stream) for stream in streams] == [[i + 1 + n for n in range(21)] for i in range(3)]
    for session in (*others, failing):
        session.close()


def test_an_engine_that_cannot_rewind_loses_the_session_and_says_why() -> None:
    with (
        shmsched.launch(f"{ENGINES}:SpoiledForGood") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        assert tokens(session.submit([1])) == [2]
        with pytest.raises(shmsched.StepFailed, match="has NaN"):
            session.submit([Spoiled.NAN]).result(DEADLINE)
        with pytest.raises(shmsched.SessionLost, match="has NaN at index 3 of 40.*cannot rewind"):
            session.submit([1]).result(DEADLINE)
        with client.open_session() as other:
            assert tokens(other.submit([1])) == [2]

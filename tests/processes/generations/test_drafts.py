"""Drafts that the model verifies: fewer steps for the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shmsched
from shmsched.client.generation import Draft, EngineDraft, FinishReason, PromptLookup

from processes.engines import Reciter
from processes.expected import VOCAB, echoes
from processes.ways import ENGINES


def steps(cluster: shmsched.Cluster) -> int:
    ledger = cluster.status()["ledger"]
    assert ledger["balanced"]
    return int(ledger["submitted"])


def test_looking_up_saves_steps_where_text_repeats_itself() -> None:
    with (
        shmsched.launch(f"{ENGINES}:Reciter") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        text = Reciter.TEXT.encode() * 10
        prompt = list(text[:60])
        before = steps(cluster)
        plain = list(session.generate(prompt, max_new_tokens=90))
        between = steps(cluster)
        with client.open_session() as other:
            drafted = list(other.generate(prompt, max_new_tokens=90, draft=PromptLookup()))
        assert drafted == plain == list(text[60:150])
        assert between - before == 90
        assert steps(cluster) - between <= 15


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_smaller_model_drafts(cluster: shmsched.Cluster, client: shmsched.Client, temperature: float) -> None:
    """At a temperature the drafts are drawn, and verified by rejection sampling from raw logits."""
    with client.open_session(model="echo") as session, client.open_session(model="small") as small:
        draft = EngineDraft(small, 4)
        sampling = shmsched.SamplingParams(temperature, seed=1)
        before = cluster.status()
        tokens = list(session.generate([1, 2, 3], max_new_tokens=41, draft=draft, sampling=sampling))
        after = cluster.status()
        assert tokens == echoes([1, 2, 3], 41)
        assert list(session.generate([7], max_new_tokens=10, draft=draft, sampling=sampling)) == echoes(
            [1, 2, 3, *tokens, 7], 10
        )
        (ran,) = (
            a["steps"] - b["steps"]
            for a, b in zip(after["engines"], before["engines"], strict=True)
            if a["model"] == "echo"
        )
        # Four drafts and a token of its own for each step.
        assert ran <= 10
        assert draft.error is None


def test_wrong_drafts_change_nothing_and_the_drafter_keeps_in_step() -> None:
    with (
        shmsched.launch(f"echo?vocab={VOCAB}", f"{ENGINES}:Nearly?vocab={VOCAB}&model=nearly") as cluster,
        cluster.client() as client,
        client.open_session(model="echo") as session,
        client.open_session(model="nearly") as nearly,
    ):
        tokens = list(session.generate([1, 2, 3], max_new_tokens=60, draft=EngineDraft(nearly, 3)))
        assert tokens == echoes([1, 2, 3], 60)
        assert steps(cluster) > 60, "the drafts cost steps too"
        assert nearly.history.tolist()[:40] == [1, 2, 3, *tokens[:37]]
        # One drafter may serve another text, of which it has seen nothing.
        draft = EngineDraft(nearly, 3)
        with client.open_session(model="echo") as other:
            tokens = list(other.generate([9, 8, 7, 6, 5], max_new_tokens=20, draft=draft))
            assert tokens == echoes([9, 8, 7, 6, 5], 20)
            list(session.generate([4], max_new_tokens=6, draft=draft))
            tokens += list(other.generate([], max_new_tokens=20, draft=draft))
        assert tokens == echoes([9, 8, 7, 6, 5], 40)
        assert nearly.history.tolist()[:40] == [9, 8, 7, 6, 5, *tokens[:35]]


def test_a_drafter_that_is_lost_is_done_without(client: shmsched.Client, session: shmsched.Session) -> None:
    with client.open_session(model="small") as small:
        draft = EngineDraft(small, 4)
        generation = session.generate([1, 2, 3], max_new_tokens=30, draft=draft)
        tokens = [next(generation) for _ in range(8)]
        small.close()
        assert tokens + list(generation) == echoes([1, 2, 3], 30)
        assert isinstance(draft.error, shmsched.SessionClosed)


def test_why_there_are_no_drafts_is_told_at_once_and_the_next_generation_tries_again(client: shmsched.Client) -> None:
    with client.open_session(model="echo") as session, client.open_session(model="small") as small:
        draft = EngineDraft(small, 4)
        # Somebody else uses the drafter's session: that is no reason to end the generation either.
        busy = small.generate([1], max_new_tokens=2000)
        generation = session.generate([1, 2, 3], max_new_tokens=30, draft=draft)
        tokens = [next(generation) for _ in range(3)]
        assert isinstance(generation.draft_error, shmsched.InvalidRequest)
        assert "is generating" in str(draft.error)
        assert tokens + list(generation) == echoes([1, 2, 3], 30)
        assert generation.error is None
        busy.close()
        generation = session.generate([], max_new_tokens=20, draft=draft)
        assert tokens + list(generation) == [*tokens, *echoes([1, 2, 3], 50)[30:]]
        assert generation.draft_error is draft.error is None
        small.close()
        generation = session.generate([], max_new_tokens=20, draft=draft)
        assert len(list(generation)) == 20
        assert isinstance(generation.draft_error, shmsched.SessionClosed)


class Drafts:
    """Gives what it is told to, once; then nothing."""

    def __init__(self, draft: Any) -> None:
        self._draft = draft

    def draft(self, tokens: Any, n: int) -> Any:
        given, self._draft = self._draft, Draft([])
        return given


EVEN = np.full(VOCAB, 1 / VOCAB)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft([1, 2], [EVEN]), "2 tokens and 1 distribution; one for each is wanted"),
        (Draft([1], [EVEN, EVEN]), "1 token and 2 distributions"),
        (
            Draft([1, 2], [EVEN, EVEN[:-1]]),
            r"distribution 1 of the draft, of token 2, has shape \(999,\); \(1000,\) is wanted",
        ),
        (Draft([1], [EVEN[np.newaxis]]), r"has shape \(1, 1000\)"),
        (Draft([1], [[[0.5], [0.25, 0.25]]]), "distribution 0 of the draft, of token 1, is no row of numbers"),
        (Draft([1], EVEN), r"1 token and 1000 distributions"),
        (Draft([1], [EVEN * np.nan]), "adds up to nan"),
        (Draft([1], [EVEN * 3]), "adds up to 3"),
        (Draft([1], [EVEN - 2 / VOCAB]), "its least value is -0.001"),
        (Draft([0], [np.eye(VOCAB)[1]]), "gives that token no probability"),
        (Draft([1], 0.5), "a Draft of tokens and distributions"),
        (Draft([VOCAB]), "token 1000 is outside the vocabulary"),
        (Draft([1.5]), "token 1.5 is not an integer"),
        (Draft([[1, 2], [3]]), "the drafter gave the tokens"),
        (None, "the drafter returned None; a Draft"),
        ([1, 2], "a Draft of tokens"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_none_is_named_and_the_session_goes_on(
    session: shmsched.Session, draft: Any, message: str, temperature: float
) -> None:
    sampling = shmsched.SamplingParams(temperature, seed=1)
    generation = session.generate([1, 2, 3], max_new_tokens=30, draft=Drafts(draft), sampling=sampling)
    with pytest.raises(shmsched.InvalidRequest, match=message):
        list(generation)
    assert generation.finish_reason is FinishReason.FAILED
    fed = [*session.history.tolist(), *([] if session.unfed is None else [session.unfed])]
    assert fed == ([1, 2, 3, *generation.tokens] if generation.tokens else [])
    assert list(session.generate([9], max_new_tokens=3)) == echoes([*fed, 9], 3)


def test_drafts_of_any_array_are_taken(session: shmsched.Session) -> None:
    for draft in (Draft(np.array([4, 5]), np.stack([EVEN, EVEN])), Draft((4,), [EVEN.astype(np.float32)]), Draft([])):  # type: ignore[arg-type]
        fed = [*session.history.tolist(), *([] if session.unfed is None else [session.unfed])]
        tokens = list(
            session.generate([1], max_new_tokens=6, draft=Drafts(draft), sampling=shmsched.SamplingParams(1.0, seed=1))
        )
        assert tokens == echoes([*fed, 1], 6)


def test_drafts_that_cannot_be_verified_are_refused(client: shmsched.Client, session: shmsched.Session) -> None:
    with pytest.raises(shmsched.InvalidRequest, match="cannot draft for itself"):
        session.generate([1], max_new_tokens=1, draft=EngineDraft(session))
    with pytest.raises(shmsched.InvalidRequest, match="a logits_processor or a draft"):
        session.generate([1], max_new_tokens=1, draft=PromptLookup(), logits_processor=lambda tokens, row: row)
    with (
        shmsched.launch("echo?vocab=500", "echo?vocab=400&model=other") as cluster,
        cluster.client() as client,
        client.open_session(model="echo") as one,
        client.open_session(model="other") as other,
        pytest.raises(shmsched.InvalidRequest, match="a vocabulary of 400"),
    ):
        one.generate([1], max_new_tokens=1, draft=EngineDraft(other))

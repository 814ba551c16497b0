"""Drafts that the model verifies: fewer steps for the same tokens."""

from __future__ import annotations

import pytest

import shmsched
from shmsched.client.generation import EngineDraft, PromptLookup

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

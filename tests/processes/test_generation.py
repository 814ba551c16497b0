"""Generations over real processes: their tokens, how they end, and where the session stands afterwards."""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmsched
from shmsched.client.generation import EngineDraft, FinishReason, Generation, PromptLookup
from shmsched.workers.echo import advance, answer

from processes.engines import FAIL, Reciter
from processes.expected import VOCAB, echoes
from processes.leftovers import wait_until

DEADLINE = 30.0
ENGINES = Path(__file__).with_name("engines.py")
Ways = dict[str, dict[str, Any]]
WAYS: Ways = {
    "continuation": {},
    "client-driven": {"continuation": False},
    "processed": {"logits_processor": lambda tokens, row: row},
    "drafted": {"draft": PromptLookup()},
}
way_of = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    spec = f"echo?vocab={VOCAB}&max_session_tokens=3000"
    with shmsched.launch(spec, f"{spec}&model=small&step_us=0", max_prefill_chunk_size=16) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: shmsched.Cluster) -> Iterator[shmsched.Client]:
    with cluster.client() as client:
        yield client


@pytest.fixture
def session(client: shmsched.Client) -> Iterator[shmsched.Session]:
    with client.open_session(model="echo", seed=5) as session:
        yield session


@way_of
@pytest.mark.parametrize("n_prompt", [1, 16, 100])
def test_each_token_follows_from_the_last(session: shmsched.Session, way: dict[str, Any], n_prompt: int) -> None:
    prompt = list(range(n_prompt))
    generation = session.generate(prompt, max_new_tokens=12, **way)
    assert generation.finish_reason is None
    assert list(generation) == generation.tokens == echoes(prompt, 12)
    assert generation.finish_reason is FinishReason.LENGTH
    assert session.position == n_prompt + 11, "the last token is not fed"
    assert session.history.tolist() == prompt + generation.tokens[:-1]
    assert session.unfed == generation.tokens[-1]
    assert list(generation) == [], "it has ended"


@way_of
def test_a_second_generation_goes_on_where_the_session_stands(session: shmsched.Session, way: dict[str, Any]) -> None:
    first = list(session.generate([1, 2, 3], max_new_tokens=5, **way))
    second = list(session.generate([], max_new_tokens=5, **way))
    assert first + second == echoes([1, 2, 3], 10)
    third = list(session.generate([7, 8], max_new_tokens=5, **way))
    assert third == echoes([1, 2, 3, *first, *second, 7, 8], 5)


@way_of
def test_it_ends_before_a_stop_token_which_is_fed_first_later(session: shmsched.Session, way: dict[str, Any]) -> None:
    expected = echoes([5], 8)
    generation = session.generate([5], max_new_tokens=10, stop_tokens={expected[4]}, **way)
    assert list(generation) == expected[:4]
    assert generation.finish_reason is FinishReason.STOP
    assert session.unfed == expected[4]
    assert list(session.generate([], max_new_tokens=3, **way)) == expected[5:]


def test_more_stop_tokens_than_the_scheduler_takes_end_it_too(session: shmsched.Session) -> None:
    expected = echoes([5], 8)
    stops = [expected[4], *(t for t in range(100) if t not in expected)][:40]
    assert list(session.generate([5], max_new_tokens=10, stop_tokens=stops)) == expected[:4]


@way_of
def test_it_ends_when_the_session_is_full(session: shmsched.Session, way: dict[str, Any]) -> None:
    most = session.model.max_session_tokens
    prompt = [i % 7 for i in range(most - 5)]
    generation = session.generate(prompt, max_new_tokens=100, **way)
    assert list(generation) == echoes(prompt, 6)
    assert generation.finish_reason is FinishReason.LENGTH
    assert session.position == most
    with pytest.raises(shmsched.InvalidRequest, match="3001"):
        session.generate([], max_new_tokens=1, **way)


@way_of
def test_leaving_the_loop_cancels_and_the_session_can_be_used(session: shmsched.Session, way: dict[str, Any]) -> None:
    expected = echoes([1, 2, 3], 40)
    generation = session.generate([1, 2, 3], max_new_tokens=2000, **way)
    for n, token in enumerate(generation, 1):
        assert token == expected[n - 1]
        if n == 4:
            break
    assert generation.finish_reason is FinishReason.CANCELLED
    assert generation.tokens == expected[:4]
    assert (session.position, session.unfed) == (6, expected[3])
    with pytest.raises(ZeroDivisionError):
        for _ in session.generate([], max_new_tokens=2000, **way):
            1 / 0  # noqa: B018
    assert (session.position, session.unfed) == (7, expected[4])
    with session.generate([], max_new_tokens=2000, **way) as generation:
        assert [next(generation), next(generation)] == expected[5:7]
    assert generation.finish_reason is FinishReason.CANCELLED
    generation.close()
    assert list(session.generate([], max_new_tokens=3, **way)) == expected[7:10]
    assert session.submit([9]).result(DEADLINE).tokens.tolist() == echoes([1, 2, 3, *expected[:9], 9], 1)
    assert session.unfed is None, "nobody knows whether it still follows"


@way_of
def test_closing_before_the_first_token_leaves_no_trace(session: shmsched.Session, way: dict[str, Any]) -> None:
    session.generate(list(range(50)), max_new_tokens=5, **way).close()
    assert (session.position, session.unfed) == (0, None)
    assert list(session.generate([3, 4], max_new_tokens=3, **way)) == echoes([3, 4], 3)


@way_of
def test_closing_when_all_has_come_leaves_what_was_not_taken_undone(
    cluster: shmsched.Cluster, session: shmsched.Session, way: dict[str, Any]
) -> None:
    expected = echoes([1, 2], 10)
    generation = session.generate([1, 2], max_new_tokens=6, **way)
    first = next(generation)

    def idle() -> bool:
        ledger = cluster.status()["ledger"]
        return bool(ledger["queued"] == ledger["in_flight"] == 0)

    wait_until(idle, "all steps to have run")
    generation.close()
    assert generation.tokens == [first]
    assert (session.position, session.unfed) == (2, first)
    assert session.history.tolist() == [1, 2]
    assert list(session.generate([], max_new_tokens=4, **way)) == expected[1:5]


@pytest.mark.parametrize("continuation", [True, False])
def test_what_is_left_is_cancelled_within_one_step(continuation: bool) -> None:
    with (
        shmsched.launch(f"echo?vocab={VOCAB}&step_us=20000") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        for n, _ in enumerate(session.generate([1], max_new_tokens=1000, continuation=continuation), 1):
            if n == 3:
                break

        def idle() -> bool:
            ledger = cluster.status()["ledger"]
            return bool(ledger["queued"] == ledger["in_flight"] == 0)

        wait_until(idle, "nothing of it to be left")
        ledger = cluster.status()["ledger"]
        assert ledger["balanced"]
        # The one that ran as it was left may count as completed or as cancelled.
        assert ledger["submitted"] <= 5


def test_a_generation_that_nobody_refers_to_is_cancelled(session: shmsched.Session) -> None:
    generation = session.generate([1, 2], max_new_tokens=2000)
    first = next(generation)
    del generation
    gc.collect()
    assert (session.position, session.unfed) == (2, first)
    # In a cycle, only the collector finds it.
    holder: list[Any] = [session.generate([], max_new_tokens=2000)]
    holder.append(holder)
    next(holder[0])
    del holder
    gc.collect()
    wait_until(lambda: session.unfed is not None, "the collected generation to be cancelled")
    assert session.position == 3


def test_a_generation_that_is_collected_under_the_clients_lock_waits_for_nobody(session: shmsched.Session) -> None:
    """A finalizer runs anywhere: in a thread that holds the very lock that cancelling takes."""
    generation = session.generate([1, 2], max_new_tokens=2000)
    next(generation)
    with session._client._channel.lock:
        del generation
    wait_until(lambda: session.unfed is not None, "the collected generation to be cancelled")
    assert session.position == 2


@way_of
def test_the_next_step_runs_while_the_caller_deals_with_a_token(
    cluster: shmsched.Cluster, session: shmsched.Session, way: dict[str, Any]
) -> None:
    before = cluster.status()["ledger"]["completed"]
    for n, _ in enumerate(session.generate([1], max_new_tokens=4, **way), 1):
        steps = min(n + 1, 4)
        wait_until(lambda: cluster.status()["ledger"]["completed"] - before >= steps, f"{steps} steps to have run")  # noqa: B023


@way_of
def test_timings(session: shmsched.Session, way: dict[str, Any]) -> None:
    began = time.monotonic()
    generation = session.generate([1], max_new_tokens=8, **way)
    assert generation.timings == shmsched.client.generation.Timings(None, None, None, None)
    list(generation)
    took = time.monotonic() - began
    timings = generation.timings
    assert timings.time_to_first_token is not None
    assert timings.inter_token_mean is not None
    assert timings.inter_token_max is not None
    assert timings.queue_wait is not None
    assert 0 < timings.inter_token_mean <= timings.inter_token_max
    assert math.isclose(timings.time_to_first_token + 7 * timings.inter_token_mean, took, abs_tol=0.2)
    # A caller who takes its time changes nothing in when tokens came.
    generation = session.generate([], max_new_tokens=3, continuation=True)
    time.sleep(0.2)
    list(generation)
    assert generation.timings.time_to_first_token is not None
    assert generation.timings.time_to_first_token < 0.19


@pytest.mark.parametrize("continuation", [True, False])
def test_a_failed_step_ends_it_with_its_error_and_the_session_goes_on(continuation: bool) -> None:
    with (
        shmsched.launch(f"{ENGINES}:Moody?vocab={VOCAB}") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        prompt, expected = next(
            ([a, b], e)
            for a in range(200, 400)
            for b in range(200, 400)
            if FAIL in (e := echoes([a, b], 20)) and not set(range(100, 109)) & {*e[: e.index(FAIL)]}
        )
        n = expected.index(FAIL) + 1
        generation = session.generate(prompt, max_new_tokens=50, continuation=continuation)
        with pytest.raises(shmsched.StepFailed, match="told to fail"):
            list(generation)
        assert generation.finish_reason is FinishReason.FAILED
        assert isinstance(generation.error, shmsched.StepFailed)
        assert generation.tokens == expected[: len(generation.tokens)]
        assert len(generation.tokens) in (n, n - 1)
        assert (session.position, session.unfed) == (len(generation.tokens) + 1, generation.tokens[-1])


def test_a_deadline_ends_it(session: shmsched.Session) -> None:
    generation = session.generate([1], max_new_tokens=3000, deadline=time.monotonic() + 0.1, continuation=False)
    with pytest.raises(shmsched.DeadlineExceeded):
        list(generation)
    assert generation.finish_reason is FinishReason.FAILED
    assert session.unfed == generation.tokens[-1]


def test_an_interrupt_while_it_waits_cancels_it() -> None:
    with (
        shmsched.launch(f"echo?vocab={VOCAB}&step_us=300000") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        generation = session.generate([1], max_new_tokens=1000)
        first = next(generation)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            next(generation)
        assert generation.finish_reason is FinishReason.CANCELLED
        assert (session.position, session.unfed) == (1, first)


# --- engines that cannot rewind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("continuation", [True, False])
def test_what_an_engine_that_cannot_rewind_has_run_counts_as_given(continuation: bool) -> None:
    with (
        shmsched.launch(f"{ENGINES}:Rigid?vocab={VOCAB}&step_us=2000") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        expected = echoes([1, 2], 200)
        generation = session.generate([1, 2], max_new_tokens=150, continuation=continuation)
        for n, _ in enumerate(generation, 1):
            if n == 3:
                break
        kept = generation.tokens
        assert kept == expected[: len(kept)]
        assert 3 <= len(kept) < 100
        assert session.history.tolist() == [1, 2, *kept[:-1]]
        assert session.unfed == kept[-1]
        assert list(session.generate([], max_new_tokens=5)) == expected[len(kept) : len(kept) + 5]
        with pytest.raises(shmsched.Unsupported, match="cannot rewind"):
            session.generate([], max_new_tokens=5, draft=PromptLookup())
        with pytest.raises(shmsched.Unsupported, match="so it cannot draft"):
            EngineDraft(session)


# --- drafts -------------------------------------------------------------------------------------------------------------------


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


# --- raw logits ---------------------------------------------------------------------------------------------------------------


def test_the_processor_sees_the_row_in_shared_memory_and_its_rows_come_back(session: shmsched.Session) -> None:
    seen: list[np.ndarray] = []

    def second_best(tokens: Any, row: np.ndarray) -> np.ndarray:
        assert not row.flags.writeable
        assert not row.flags.owndata
        seen.append(row[:1])
        changed = row.copy()
        changed[int(row.argmax())] = -np.inf
        return changed

    h = advance(0, [1, 2])
    tokens = list(session.generate([1, 2], max_new_tokens=5, logits_processor=second_best))
    for token in tokens:
        row = ((np.arange(VOCAB) * 40503) & 0xFFFF).astype(np.float32)
        row[answer(h, VOCAB)] = -np.inf
        assert token == int(row.argmax())
        h = advance(h, [token])
    seen.clear()
    arena = session._client._channel.arena
    assert arena is not None
    assert arena.leased == 0


def test_what_a_processor_raises_ends_it(session: shmsched.Session) -> None:
    def refuses(tokens: Any, row: np.ndarray) -> np.ndarray:
        if len(tokens) == 2:
            raise LookupError("no")
        return row

    generation = session.generate([1, 2], max_new_tokens=5, logits_processor=refuses)
    with pytest.raises(LookupError, match="no"):
        list(generation)
    assert generation.finish_reason is FinishReason.FAILED
    assert generation.tokens == echoes([1, 2], 2)[: len(generation.tokens)]
    assert (session.position, session.unfed) == (1 + len(generation.tokens), generation.tokens[-1])


def test_the_client_samples_by_the_rule_of_the_engines_host() -> None:
    class Same:
        def __call__(self, tokens: Any, row: np.ndarray) -> np.ndarray:
            return row

    with shmsched.launch(f"{ENGINES}:Flat") as cluster, cluster.client() as client:
        for sampling in (shmsched.SamplingParams(1.0, seed=3), shmsched.SamplingParams(2.0, 0.9, 7), None):
            ways: list[dict[str, Any]] = [
                {},
                {"continuation": False},
                {"logits_processor": Same()},
                {"draft": PromptLookup()},
            ]
            tokens = []
            for way in ways:
                with client.open_session(seed=9) as session:
                    how = shmsched.SamplingParams(1.0) if sampling is None else sampling
                    tokens.append(list(session.generate(list(range(40)), max_new_tokens=30, sampling=how, **way)))
            assert tokens[1:] == tokens[:-1]
            assert len(set(tokens[0])) > 5


# --- text ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reciting() -> Iterator[shmsched.Client]:
    with shmsched.launch(f"{ENGINES}:Reciter?times=3") as cluster, cluster.client() as client:
        yield client


def test_text_comes_at_character_boundaries(reciting: shmsched.Client) -> None:
    increments = list(reciting.generate_text("na", max_new_tokens=1000))
    text = (Reciter.TEXT * 3)[2:]
    assert "".join(increments) == text
    assert increments == list(text), "each character comes as soon as it is complete"
    with reciting.open_session() as session:
        generation = session.generate(list(b"na"), max_new_tokens=12)
        assert "".join(generation.increments()) == generation.text
        # Cut within a character.
        assert generation.text == text.encode()[:12].decode(errors="replace")


@pytest.mark.parametrize("continuation", [True, False])
@pytest.mark.parametrize(
    ("stop", "kept"), [(["END"], "ïve 日本 🙂 "), (["🙂", "zzz"], "ïve 日本 "), (["of", " it"], "ïve 日本 🙂 END ")]
)
def test_text_ends_before_a_stop_text(
    reciting: shmsched.Client, stop: list[str], kept: str, continuation: bool
) -> None:
    with reciting.open_session() as session:
        generation = session.generate(list(b"na"), max_new_tokens=1000, stop=stop, continuation=continuation)
        increments = list(generation.increments())
        assert "".join(increments) == generation.text == kept
        assert bytes(generation.tokens) == kept.encode()
        assert generation.finish_reason is FinishReason.STOP
        # The session holds all that was sampled but the last token, the stop text among it.
        sampled = kept.encode() + stop[0].encode()
        assert bytes(session.history.tolist()) == b"na" + sampled[:-1]
        assert session.unfed == sampled[-1]
        more = bytes(session.generate([], max_new_tokens=4))
        assert Reciter.TEXT.encode()[2 + len(sampled) :].startswith(more)
    assert "".join(reciting.generate_text("na", stop=stop)) == kept


def test_leaving_a_text_closes_its_session(reciting: shmsched.Client) -> None:
    for text in reciting.generate_text("na", max_new_tokens=1000):
        assert text == "ï"
        break
    wait_until(lambda: not reciting._state.sessions, "its session to be closed")


def test_text_wants_a_tokenizer(client: shmsched.Client, session: shmsched.Session) -> None:
    with pytest.raises(shmsched.Unsupported, match="'echo' has no tokenizer"):
        list(client.generate_text("Hello", model="echo"))
    with pytest.raises(shmsched.Unsupported, match="no tokenizer"):
        session.generate([1], max_new_tokens=1, stop=["."])


# --- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "how", "message"),
    [
        ([], {}, "tokens are empty"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([1], {"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ([1], {"sampling": None}, "sampling is None; a SamplingParams is wanted"),
        ([1], {"stop_tokens": [VOCAB]}, "token 1000 is outside"),
        ([1], {"on_session_lost": "ignore"}, "on_session_lost is 'ignore'"),
        ([VOCAB], {}, "token 1000 is outside"),
    ],
)
def test_what_can_never_be_done_is_refused_at_the_call(
    session: shmsched.Session, prompt: list[int], how: dict[str, Any], message: str
) -> None:
    with pytest.raises(shmsched.InvalidRequest, match=message):
        session.generate(prompt, **{"max_new_tokens": 5, **how})
    assert list(session.generate([1], max_new_tokens=2)) == echoes([1], 2)


# --- lost sessions ------------------------------------------------------------------------------------------------------------


def kill_its_engine(cluster: shmsched.Cluster, session: shmsched.Session) -> None:
    (pid,) = (e["pid"] for e in cluster.status()["engines"] if e["engine"] == session.engine)
    os.kill(pid, signal.SIGKILL)


@pytest.fixture(params=[1, 2], ids=["restarted", "another"])
def slow(request: pytest.FixtureRequest) -> Iterator[shmsched.Cluster]:
    with shmsched.launch(
        f"echo?vocab={VOCAB}&step_us=1000", engines=request.param, max_prefill_chunk_size=16
    ) as cluster:
        yield cluster


@way_of
def test_killing_engines_costs_a_pause_and_no_token(slow: shmsched.Cluster, way: dict[str, Any]) -> None:
    with slow.client() as client, client.open_session() as session:
        before = list(session.generate([4, 5, 6], max_new_tokens=20))
        generation = session.generate([1, 2, 3], max_new_tokens=60, on_session_lost="replay", **way)
        tokens = []
        for n, token in enumerate(generation):
            tokens.append(token)
            if n in (10, 30):
                kill_its_engine(slow, session)
        fed = [4, 5, 6, *before, 1, 2, 3]
        assert tokens == echoes(fed, 60)
        assert session.history.tolist() == fed + tokens[:-1]
        assert list(session.generate([], max_new_tokens=5)) == echoes(fed, 65)[60:]


def test_otherwise_the_caller_is_told(slow: shmsched.Cluster) -> None:
    with slow.client() as client, client.open_session() as session:
        generation = session.generate([1, 2, 3], max_new_tokens=10_000)
        first = next(generation)
        kill_its_engine(slow, session)
        with pytest.raises((shmsched.EngineDied, shmsched.SessionLost)):
            list(generation)
        assert generation.finish_reason is FinishReason.FAILED
        assert generation.tokens[0] == first
        with pytest.raises((shmsched.EngineDied, shmsched.SessionLost)):
            session.generate([1], max_new_tokens=1)


def test_a_generation_is_shown_as_it_stands(session: shmsched.Session) -> None:
    generation = session.generate([1], max_new_tokens=2)
    assert repr(generation) == "<Generation of 'echo', 0 tokens, running>"
    list(generation)
    assert repr(generation) == "<Generation of 'echo', 2 tokens, length>"
    assert isinstance(generation, Generation)


def test_a_child_process_leaves_its_parents_generation_alone(session: shmsched.Session) -> None:
    generation = session.generate([1], max_new_tokens=500)
    tokens = [next(generation)]
    child = os.fork()
    if child == 0:
        generation.close()
        del generation
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tokens + list(generation) == echoes([1], 500)


@way_of
def test_a_second_generation_is_refused_until_the_first_has_ended(
    session: shmsched.Session, way: dict[str, Any]
) -> None:
    """Whatever has come meanwhile: what the caller was not given yet is sampled, and the session goes on behind it."""
    first = session.generate([1, 2, 3], max_new_tokens=4, **way)
    given = [next(first)]
    stands_still: list[int] = []

    def still() -> bool:
        stands_still.append(session.position)
        return len(stands_still) > 20 and len(set(stands_still[-20:])) == 1

    wait_until(still, "all to come that comes by itself")
    for go_on in (lambda: session.generate([9], max_new_tokens=2), lambda: session.submit([9])):
        with pytest.raises(shmsched.InvalidRequest, match=r"session \d+ is generating; close that generation"):
            go_on()
    given += first
    assert given == echoes([1, 2, 3], 4)
    second = session.generate([9], max_new_tokens=2, **way)
    assert list(second) == echoes([1, 2, 3, *given, 9], 2)


@way_of
def test_who_has_all_tokens_may_go_on_without_asking_for_one_more(
    session: shmsched.Session, way: dict[str, Any]
) -> None:
    first = session.generate([1, 2, 3], max_new_tokens=4, **way)
    given = [next(first) for _ in range(4)]
    assert list(session.generate([], max_new_tokens=2, **way)) == echoes([1, 2, 3, *given], 2)
    assert list(first) == []
    first.close()
    assert session.submit([5]).result(DEADLINE).tokens.tolist() == echoes(session.history.tolist(), 1)


def test_a_session_that_stands_for_a_new_one_has_nothing_left_to_feed(session: shmsched.Session) -> None:
    list(session.generate([1], max_new_tokens=2))
    assert session.unfed is not None
    session.reopen()
    assert list(session.generate([7], max_new_tokens=3)) == echoes([7], 3)


def test_interrupts_at_any_moment_leave_the_session_free_and_what_it_holds_known(client: shmsched.Client) -> None:
    inside = threading.Event()
    over = threading.Event()

    def interrupt() -> None:
        while not over.is_set():
            if inside.wait(0.1):
                time.sleep(random.random() * 0.003)
                if inside.is_set():
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                    inside.clear()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    interrupted = 0
    try:
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            with client.open_session(model="echo") as session:
                generation: Generation | None = None
                try:
                    inside.set()
                    generation = session.generate([1, 2, 3], max_new_tokens=100)
                    list(generation)
                    inside.clear()
                    time.sleep(0.01)
                except KeyboardInterrupt:
                    interrupted += 1
                inside.clear()
                if generation is not None:
                    generation.close()
                for _ in range(2):
                    token = int(session.submit([5]).result(DEADLINE).tokens[0])
                    assert [token] == echoes(session.history.tolist(), 1)
    finally:
        over.set()
        interrupter.join(DEADLINE)
        signal.signal(signal.SIGINT, before)
    assert interrupted > 20


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"stop_tokens": 5}, "stop_tokens is 5"),
        ({"logits_processor": 5}, "logits_processor is 5"),
        ({"draft": 5}, "draft is 5"),
    ],
)
def test_what_is_of_the_wrong_kind_is_named(session: shmsched.Session, wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(shmsched.InvalidRequest, match=named):
        session.generate([1], max_new_tokens=1, **wrong)
    assert list(session.generate([1], max_new_tokens=np.int64(2), stop_tokens=np.array([1, 2]))) == echoes([1], 2)

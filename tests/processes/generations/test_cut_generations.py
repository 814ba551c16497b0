"""A generation that is cut and goes on later gives the text that it gives in one piece, wherever it is cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmsched
from shmsched.client.generation import FinishReason

from processes.engines import Reciter
from processes.loops import runner_of
from processes.ways import ENGINES, WAYS, way_of

WHOLE = Reciter.TEXT * 3
TEXT = WHOLE[2:]
"""What comes after the prompt."""
PROMPT = list(b"na")
N = len(TEXT.encode())
STOPS: list[list[str]] = [[], ["END"], ["🙂 E"], ["zzz", "日本 🙂"], ["t. naï"], ["f it. naïve 日本 🙂 EN?"], [" "]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(f"{ENGINES}:Reciter?times=3") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: shmsched.Cluster) -> Iterator[shmsched.Client]:
    with cluster.client() as client:
        yield client


def up_to(stops: list[str]) -> str:
    """The text up to the first stop text that is complete."""
    found = [(TEXT.find(stop) + len(stop), TEXT.find(stop)) for stop in stops if stop in TEXT]
    return TEXT[: min(found)[1]] if found else TEXT


several = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
cuts = st.lists(st.integers(1, 20), min_size=1, max_size=6)
ways = st.sampled_from(list(WAYS.values()))


@given(
    cuts,
    st.lists(ways, min_size=7, max_size=7),
    st.sampled_from(STOPS),
    st.lists(st.booleans(), min_size=7, max_size=7),
)
@several
def test_the_parts_join_to_the_whole(
    client: shmsched.Client, cuts: list[int], ways: list[dict[str, Any]], stop: list[str], read: list[bool]
) -> None:
    with client.open_session() as session:
        text, prompt, reason = "", PROMPT, FinishReason.LENGTH
        for most, way, reads in zip([*cuts, 1000], ways, read, strict=False):
            generation = session.generate(prompt, max_new_tokens=most, stop=stop, **way)
            if reads:
                given = "".join(generation.increments())
            else:
                list(generation)
                given = generation.text
            assert given == generation.text
            assert len(generation.tokens) <= most
            text, prompt, reason = text + given, [], generation.finish_reason or reason
            assert up_to(stop).startswith(text)
            if reason is FinishReason.STOP:
                break
        assert text == up_to(stop)
        assert reason is FinishReason.STOP


@way_of
def test_a_cut_at_each_place(client: shmsched.Client, way: dict[str, Any]) -> None:
    first = len("ïve 日本 🙂".encode())
    for cut in range(1, first + 1):
        with client.open_session() as session:
            generation = session.generate(PROMPT, max_new_tokens=cut, **way)
            before = "".join(generation.increments())
            assert before == TEXT.encode()[:cut].decode(errors="ignore")
            assert generation.held_back == ""
            after = "".join(session.generate([], max_new_tokens=N, **way).increments())
            assert before + after == TEXT


@pytest.mark.parametrize("cut", [16, 17, 18, 19])
def test_half_a_stop_text_before_the_cut_ends_what_comes_after_it(client: shmsched.Client, cut: int) -> None:
    """The text before it comes once; what was given as a part of it never was."""
    before = "ïve 日本 🙂 "
    assert len(before.encode()) == 17
    with client.open_session() as session:
        first = session.generate(PROMPT, max_new_tokens=cut, stop=["END"])
        assert len(list(first)) == cut
        assert first.held_back == "END"[: max(0, cut - 17)]
        second = session.generate([], max_new_tokens=100, stop=["END"])
        assert first.text + "".join(second.increments()) == before
        assert second.finish_reason is FinishReason.STOP
    with client.open_session() as session:
        first = session.generate(PROMPT, max_new_tokens=cut, stop=["END"])
        # Without the stop text it is text like any other.
        assert "".join(first.increments()) + "".join(session.generate([], max_new_tokens=N).increments()) == TEXT


def test_what_is_fed_or_rewound_in_between_drops_what_was_held_back(client: shmsched.Client) -> None:
    between: list[tuple[list[int], int | None]] = [(list(b"xy"), None), ([0xF0], None), (list(b"x"), 3)]
    for (fed, position), (cut, stop) in itertools.product(between, ((18, ["END"]), (14, []))):
        with client.open_session() as session:
            list(session.generate(PROMPT, max_new_tokens=cut, stop=stop))
            prompt = fed
            if position is not None:
                session.submit(fed, position=position).result(30)
                prompt = list(b"y")
            generation = session.generate(prompt, max_new_tokens=60, stop=["zzz"])
            text = "".join(generation.increments())
            assert text == bytes(generation.tokens).decode(errors="replace").rstrip("\ufffd")


def test_a_fork_goes_on_as_its_parent_would(client: shmsched.Client) -> None:
    for cut, stop in ((15, []), (18, ["END"])):
        with client.open_session() as session:
            before = "".join(session.generate(PROMPT, max_new_tokens=cut, stop=stop).increments())
            with session.fork() as fork, session.fork(3) as shorter:
                assert shorter.unfed is None
                for one in (session, fork):
                    assert before + "".join(one.generate([], max_new_tokens=N, stop=stop).increments()) == up_to(stop)
                ended = shorter.generate(PROMPT, max_new_tokens=5)
                assert "".join(ended.increments()) == bytes(ended.tokens).decode(errors="ignore")


@pytest.mark.parametrize("stop", [[], ["END"]])
def test_leaving_gives_no_text_twice(client: shmsched.Client, stop: list[str]) -> None:
    for n in range(1, 10):
        with client.open_session() as session:
            generation = session.generate(PROMPT, max_new_tokens=1000, stop=stop)
            text = "".join(itertools.islice(generation.increments(), n))
            generation.close()
            assert text == generation.text
            text += "".join(session.generate([], max_new_tokens=N, stop=stop).increments())
            assert text == up_to(stop)
        with client.open_session() as session:
            generation = session.generate(PROMPT, max_new_tokens=1000, stop=stop)
            for _ in range(n):
                next(generation)
            generation.close()
            more = session.generate([], max_new_tokens=N, stop=stop)
            assert generation.text + "".join(more.increments()) == up_to(stop)


def test_a_prompt_that_ends_within_a_character_gives_it_with_the_token_that_completes_it(
    client: shmsched.Client,
) -> None:
    encoded = WHOLE.encode()
    for n in range(1, 20):
        with client.open_session() as session:
            text = "".join(session.generate(list(encoded[:n]), max_new_tokens=1000).increments())
            assert text == WHOLE[len(encoded[:n].decode(errors="ignore")) :]


def test_text_of_which_nothing_follows_is_given_whole(client: shmsched.Client) -> None:
    encoded = TEXT.encode()
    for most in range(1, 20):
        assert "".join(client.generate_text("na", max_new_tokens=most)) == encoded[:most].decode(errors="replace")
        text = "".join(client.generate_text("na", max_new_tokens=most, stop=["END"]))
        assert text == encoded[:most].decode(errors="replace")


def test_a_task_cuts_and_goes_on_too(cluster: shmsched.Cluster) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=cluster.socket) as client:
            for way in WAYS.values():
                for cut, stop in ((3, []), (9, []), (15, []), (17, ["END"]), (18, ["END"]), (19, ["END"])):
                    async with client.open_session() as session:
                        first = session.generate(PROMPT, max_new_tokens=cut, stop=stop, **way)
                        text = "".join([text async for text in first.increments()])
                        async with session.fork() as fork:
                            for one in (session, fork):
                                second = one.generate([], max_new_tokens=N, stop=stop, **way)
                                assert text + "".join([t async for t in second.increments()]) == up_to(stop)

    runner_of("asyncio")(main())

"""The text of a generation, as it comes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest

import shmsched
from shmsched.client.generation import FinishReason

from processes.engines import Reciter
from processes.leftovers import wait_until
from processes.loops import runner_of
from processes.ways import ENGINES


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


@pytest.fixture(scope="module")
def slow() -> Iterator[shmsched.Cluster]:
    with shmsched.launch(f"{ENGINES}:Reciter?step_us=5000") as cluster:
        yield cluster


def test_a_text_ends_at_its_deadline_which_holds_for_the_wait_for_a_slot_too(slow: shmsched.Cluster) -> None:
    with slow.client() as client:
        assert "".join(client.generate_text("na", max_new_tokens=2, deadline=time.monotonic() + 30)) == "ï"
        text = ""
        with pytest.raises(shmsched.DeadlineExceeded, match="was not dispatched by its deadline"):
            for part in client.generate_text("na", max_new_tokens=5000, deadline=time.monotonic() + 0.1):
                text += part
        assert (Reciter.TEXT * 1000)[2:].startswith(text)
        wait_until(lambda: not client._state.sessions, "its session to be closed")
        with pytest.raises(shmsched.DeadlineExceeded, match="as the call was made"):
            next(client.generate_text("na", deadline=time.monotonic() - 1))
        with pytest.raises(shmsched.InvalidRequest, match="deadline is nan"):
            next(client.generate_text("na", deadline=math.nan))
        sessions = [client.open_session() for _ in range(8)]
        with pytest.raises(shmsched.DeadlineExceeded, match="no session slot"):
            next(client.generate_text("na", deadline=time.monotonic() + 0.05))
        for session in sessions:
            session.close()


def test_a_text_of_a_task_ends_at_its_deadline_too(slow: shmsched.Cluster) -> None:
    async def main() -> None:
        async with shmsched.AsyncClient(socket=slow.socket) as client:

            async def text(deadline: float, most: int) -> str:
                parts = client.generate_text("na", max_new_tokens=most, deadline=deadline)
                return "".join([part async for part in parts])

            assert await text(time.monotonic() + 30, 2) == "ï"
            with pytest.raises(shmsched.DeadlineExceeded, match="was not dispatched by its deadline"):
                await text(time.monotonic() + 0.1, 5000)
            with pytest.raises(shmsched.DeadlineExceeded, match="as the call was made"):
                await text(time.monotonic() - 1, 5)
            sessions = [await client.open_session() for _ in range(8)]
            with pytest.raises(shmsched.DeadlineExceeded, match="no session slot"):
                await text(time.monotonic() + 0.05, 5)
            for session in sessions:
                await session.close()

    runner_of("asyncio")(main())


def test_text_wants_a_tokenizer(client: shmsched.Client, session: shmsched.Session) -> None:
    with pytest.raises(shmsched.Unsupported, match="'echo' has no tokenizer"):
        list(client.generate_text("Hello", model="echo"))
    with pytest.raises(shmsched.Unsupported, match="no tokenizer"):
        session.generate([1], max_new_tokens=1, stop=["."])

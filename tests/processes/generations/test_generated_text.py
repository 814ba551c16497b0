"""The text of a generation, as it comes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shmsched
from shmsched.client.generation import FinishReason

from processes.engines import Reciter
from processes.leftovers import wait_until
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


def test_text_wants_a_tokenizer(client: shmsched.Client, session: shmsched.Session) -> None:
    with pytest.raises(shmsched.Unsupported, match="'echo' has no tokenizer"):
        list(client.generate_text("Hello", model="echo"))
    with pytest.raises(shmsched.Unsupported, match="no tokenizer"):
        session.generate([1], max_new_tokens=1, stop=["."])

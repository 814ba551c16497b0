"""On a real model, greedy text is the same however it is generated, and JSON can be forced out of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import shmsched
from shmsched.client.generation import FinishReason, PromptLookup
from shmsched.client.generation.grammar import Grammar

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

DEADLINE = 120.0
N_TOKENS = 48
EXTENTS = [
    pytest.param((3, 16), id="3 prompts"),
    pytest.param((10, 48), id="10 prompts", marks=pytest.mark.soak),
]
"""Prompts, and tokens of each."""
PROMPTS = [
    "The capital of France is",
    "One, two, three, four, five, six,",
    "Once upon a time there was a fox who",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Dear Sir or Madam,\n",
    "Water boils at",
    "A list of fruits:\n- apple\n- pear\n- apple\n- pear\n",
    "Die Hauptstadt von Deutschland ist",
    "In 1969, the first human beings",
]
Way = Callable[[shmsched.Session, list[int], int], list[int]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[shmsched.Cluster]:
    with shmsched.launch("gemma?threads=1") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: shmsched.Cluster) -> Iterator[shmsched.Client]:
    with cluster.client() as client:
        yield client


@pytest.fixture(scope="module")
def model(client: shmsched.Client) -> shmsched.Model:
    (model,) = client.models.values()
    return model


@pytest.fixture(scope="module", params=EXTENTS)
def alone(request: pytest.FixtureRequest, client: shmsched.Client, model: shmsched.Model) -> list[list[int]]:
    """Each prompt by itself, driven by the scheduler, the prompt prefilled as a whole."""
    n_prompts, n_tokens = request.param
    texts = []
    for prompt in PROMPTS[:n_prompts]:
        with client.open_session() as session:
            texts.append(plain(session, model.tokenizer.encode(prompt, bos=True), n_tokens))
    return texts


def plain(session: shmsched.Session, prompt: list[int], n: int) -> list[int]:
    return list(session.generate(prompt, max_new_tokens=n, stop_tokens=()))


def client_driven(session: shmsched.Session, prompt: list[int], n: int) -> list[int]:
    return list(session.generate(prompt, max_new_tokens=n, stop_tokens=(), continuation=False))


def speculative(session: shmsched.Session, prompt: list[int], n: int) -> list[int]:
    return list(session.generate(prompt, max_new_tokens=n, stop_tokens=(), draft=PromptLookup()))


def processed(session: shmsched.Session, prompt: list[int], n: int) -> list[int]:
    generation = session.generate(prompt, max_new_tokens=n, stop_tokens=(), logits_processor=lambda tokens, row: row)
    return list(generation)


def in_parts(session: shmsched.Session, prompt: list[int], n: int) -> list[int]:
    """A few tokens, a break, and so on."""
    tokens: list[int] = []
    while len(tokens) < n:
        for token in session.generate([] if tokens else prompt, max_new_tokens=n, stop_tokens=()):
            tokens.append(token)
            if len(tokens) % 7 == 0 or len(tokens) == n:
                break
    return tokens


def chunked(size: int) -> Way:
    def way(session: shmsched.Session, prompt: list[int], n: int) -> list[int]:
        start = 0
        while len(prompt) - start > size:
            session.submit(prompt[start : start + size], output_rows=shmsched.OutputRows.NONE)
            start += size
        return plain(session, prompt[start:], n)

    return way


def forked(session: shmsched.Session, prompt: list[int], n: int) -> list[int]:
    session.submit([*prompt, 7, 8, 9], output_rows=shmsched.OutputRows.NONE).result(DEADLINE)
    with session.fork(len(prompt) - 1) as child:
        return plain(child, prompt[-1:], n)


@pytest.mark.parametrize(
    "way",
    [plain, client_driven, speculative, processed, in_parts, chunked(1), chunked(7), chunked(256), forked],
    ids=["batched", "client-driven", "speculative", "processed", "in-parts", "chunks-1", "chunks-7", "chunks-256", "forked"],
)  # fmt: skip
def test_greedy_text_is_the_same_however_it_is_generated(
    client: shmsched.Client, model: shmsched.Model, alone: list[list[int]], way: Way
) -> None:
    """All at once, so that each is batched with others too."""

    def one(prompt: str) -> list[int]:
        with client.open_session() as session:
            return way(session, model.tokenizer.encode(prompt, bos=True), len(alone[0]))

    with ThreadPoolExecutor(len(alone)) as threads:
        texts = list(threads.map(one, PROMPTS[: len(alone)]))
    wrong = [i for i, (text, expected) in enumerate(zip(texts, alone, strict=True)) if text != expected]
    assert not wrong, f"prompts {wrong} went on differently"


def test_drafts_save_steps_on_text_that_repeats_itself(
    cluster: shmsched.Cluster, client: shmsched.Client, model: shmsched.Model
) -> None:
    def steps() -> int:
        return int(cluster.status()["ledger"]["submitted"])

    prompt = model.tokenizer.encode(PROMPTS[7], bos=True)
    before = steps()
    with client.open_session() as session:
        speculative(session, prompt, N_TOKENS)
    assert steps() - before <= N_TOKENS // 2


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "Wein", "水"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "sampling", [shmsched.SamplingParams(), *(shmsched.SamplingParams(1.5, seed=s) for s in range(3))], ids=str
)
def test_a_grammar_makes_it_say_json_that_matches_a_schema(
    client: shmsched.Client, model: shmsched.Model, sampling: shmsched.SamplingParams
) -> None:
    with client.open_session() as session:
        prompt = model.tokenizer.encode("A person, as JSON:\n", bos=True)
        generation = session.generate(
            prompt, max_new_tokens=200, sampling=sampling, logits_processor=Grammar.json_schema(model, SCHEMA)
        )
        text = "".join(generation.increments())
    assert generation.finish_reason is FinishReason.STOP
    value = json.loads(text)
    assert set(value) == {"name", "age", "likes"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 120
    assert 1 <= len(value["likes"]) <= 3
    assert set(value["likes"]) <= {"tea", "coffee", "Wein", "水"}


def test_one_grammar_serves_one_generation_after_the_other(client: shmsched.Client, model: shmsched.Model) -> None:
    grammar = Grammar.regex(model, "(yes|no), (yes|no)")
    prompt = model.tokenizer.encode("Is it so? And so?", bos=True)
    for seed in range(4):
        with client.open_session() as session:
            sampling = shmsched.SamplingParams(2.0, seed=seed)
            generation = session.generate(prompt, max_new_tokens=9, sampling=sampling, logits_processor=grammar)
            list(generation)
            assert generation.text in {"yes, yes", "yes, no", "no, yes", "no, no"}
            assert generation.finish_reason is FinishReason.STOP


def test_text_comes_whole(client: shmsched.Client, model: shmsched.Model) -> None:
    increments = list(client.generate_text("日本の首都は", max_new_tokens=24))
    prompt = model.tokenizer.encode("日本の首都は", bos=True)
    with client.open_session() as session:
        tokens = list(session.generate(prompt, max_new_tokens=24))
    whole = model.tokenizer.decode([*prompt, *tokens])
    assert "日本の首都は" + "".join(increments) == whole
    assert not any("\ufffd" in text for text in increments[:-1])

"""The llama_cpp engine on a tiny random model, against a plain forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from drive import Floats, Step, batch_of, forward
from tiny import VOCAB, Reference, write_model

import shmsched
from shmsched.errors import EngineSpecError, EngineStartError
from shmsched.params import OutputRows, SamplingParams
from shmsched.scheduling.params import SchedulerParams

pytest.importorskip("llama_cpp", reason="needs the llama extra: pip install 'shmsched[llama]'")

from shmsched.workers.llama_cpp import LlamaCpp
from shmsched.workers.llama_cpp.library import llama

ALL, LAST, NONE = OutputRows.ALL, OutputRows.LAST, OutputRows.NONE
WINDOW = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # In full precision: 8-bit products of these random weights are too far off to tell a wrong key by.
    return write_model(tmp_path_factory.mktemp("llama") / "tiny.gguf", window=WINDOW, quantized=False)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture
def engine(model: Path) -> Iterator[LlamaCpp]:
    engine = started(model)
    yield engine
    engine.close()


def started(model: Path, **options: int) -> LlamaCpp:
    engine = LlamaCpp(str(model), **{"n_ctx": 4096, "threads": 1, **options})
    engine.start(SchedulerParams())
    return engine


def random_tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, len(VOCAB), n).tolist()


def assert_near(logits: Floats, expected: np.ndarray) -> None:
    """Keys and values are kept in half precision. Logits are of size 1; one wrong key changes them by that much."""
    np.testing.assert_allclose(logits, expected, atol=0.2)


def test_info_is_known_before_the_weights_are_read(model: Path) -> None:
    info = LlamaCpp(str(model), n_ctx=700, max_sessions=3).info
    assert (info.model, info.vocab_size, info.max_sessions) == ("tiny-gemma", len(VOCAB), 3)
    assert info.max_session_tokens == 700
    assert LlamaCpp(str(model), n_ctx=7000).info.max_session_tokens == 1024  # the model's own context
    assert info.stop_tokens == (1, 5)
    assert info.tokenizer == f"llama_cpp:{model}"


def test_a_mixed_batch_is_one_llama_decode(
    engine: LlamaCpp, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [random_tokens(n, seed) for seed, n in enumerate((60, 90, 41, 30))]
    for slot in range(4):
        engine.open_session(slot, b"")
    forward(engine, Step(0, 0, texts[0][:-1], NONE), Step(1, 0, texts[1][:50], NONE))
    calls = []
    decode = llama.llama_decode
    monkeypatch.setattr(llama, "llama_decode", lambda *args: calls.append(args[1].n_tokens) or decode(*args))
    found = forward(
        engine,
        Step(0, 59, texts[0][-1:]),
        Step(1, 50, texts[1][50:], ALL),
        Step(2, 0, texts[2], NONE),
        Step(3, 0, texts[3]),
    )
    assert calls == [1 + 40 + 41 + 30]
    assert_near(found[0], reference.logits(texts[0])[-1:])
    assert_near(found[1], reference.logits(texts[1])[50:])
    assert_near(found[3], reference.logits(texts[3])[-1:])


@pytest.mark.parametrize("seed", range(4))
def test_any_batching_interleaving_rewinding_and_forking_gives_the_same_logits(
    model: Path, reference: Reference, seed: int
) -> None:
    """Many short sessions follow one another in few cells, so that llama.cpp uses each of them many times."""
    rng = np.random.default_rng(seed)
    engine = started(model, n_ctx=1024, max_sessions=6)
    held: dict[int, list[int]] = {}
    forks = rewinds = 0
    for _ in range(120):
        slot = int(rng.integers(6))
        others = [s for s in held if s != slot and held[s]]
        action = rng.random()
        if slot in held and action < 0.15:
            engine.close_session(slot)
            del held[slot]
        elif slot in held and action < 0.4:
            rewinds += 1
            held[slot] = held[slot][: int(rng.integers(0, len(held[slot]) + 1))]
            engine.rewind(slot, len(held[slot]))
        elif slot not in held and others and action < 0.5:
            forks += 1
            parent = others[int(rng.integers(len(others)))]
            held[slot] = held[parent][: int(rng.integers(0, len(held[parent]) + 1))]
            engine.fork_session(parent, slot, len(held[slot]))
        elif slot not in held:
            engine.open_session(slot, b"")
            held[slot] = []
        steps = []
        for s in held:
            if rng.random() < 0.6 and len(held[s]) < 130:
                n = int(rng.choice([1, 1, 2, 30]))
                steps.append(Step(s, len(held[s]), random_tokens(n, seed=int(rng.integers(10**6)))))
        if not steps:
            continue
        for step, logits in zip(steps, forward(engine, *steps), strict=True):
            held[step.slot] = [*held[step.slot], *step.tokens]
            assert_near(logits, reference.logits(held[step.slot])[-1:])
    assert forks
    assert rewinds
    engine.close()


def test_a_session_can_go_back_further_than_its_window(model: Path, reference: Reference) -> None:
    """llama.cpp would have put another session's tokens into the cells that slid out of the window."""
    engine = started(model, n_ctx=512, max_sessions=2)
    text = random_tokens(200)
    engine.open_session(1, b"")
    forward(engine, Step(1, 0, random_tokens(100, 1)))
    engine.open_session(0, b"")
    forward(engine, Step(0, 0, text))
    engine.close_session(1)
    engine.open_session(1, b"")
    forward(engine, Step(1, 0, random_tokens(250, 2)))  # into the 100 free cells before those of session 0, and beyond
    engine.rewind(0, 90)
    rest = random_tokens(5, seed=9)
    (logits,) = forward(engine, Step(0, 90, rest, ALL))
    assert_near(logits, reference.logits([*text[:90], *rest])[90:])
    engine.close()


@pytest.mark.parametrize("length", [0, 1, 100, 150])
def test_a_fork_and_its_parent_are_independent(engine: LlamaCpp, reference: Reference, length: int) -> None:
    text, mine, other = random_tokens(150), random_tokens(9, seed=1), random_tokens(9, seed=2)
    engine.open_session(0, b"")
    forward(engine, Step(0, 0, text))
    engine.fork_session(0, 5, length)
    parent, child = forward(engine, Step(0, 150, mine, ALL), Step(5, length, other, ALL))
    assert_near(parent, reference.logits([*text, *mine])[-9:])
    assert_near(child, reference.logits([*text[:length], *other])[-9:])
    engine.rewind(0, length // 2)
    engine.close_session(0)
    (logits,) = forward(engine, Step(5, length + 9, [4]))
    assert_near(logits, reference.logits([*text[:length], *other, 4])[-1:])


def test_forks_share_their_parent_s_room(model: Path) -> None:
    engine = started(model, n_ctx=512)
    engine.open_session(0, b"")
    forward(engine, Step(0, 0, random_tokens(400)))
    for slot in range(1, 10):
        engine.fork_session(0, slot, 400)
    forward(engine, *[Step(slot, 400, random_tokens(10, slot)) for slot in range(10)])
    with pytest.raises(ValueError, match="fork of 411 tokens of the session in slot 0, which has 410"):
        engine.fork_session(0, 10, 411)
    engine.close()


def test_steps_without_room_are_deferred_and_the_others_run(model: Path, reference: Reference) -> None:
    engine = started(model, n_ctx=512)
    texts = [random_tokens(250, seed) for seed in range(4)]
    for slot in range(4):
        engine.open_session(slot, b"")
    forward(engine, Step(0, 0, texts[0]))
    batch = batch_of([Step(0, 250, [4]), Step(1, 0, texts[1], ALL), Step(2, 0, texts[2])], len(VOCAB))
    engine.forward(batch)
    assert batch.deferred == {2}
    assert batch.finish() == [251]
    raw = np.stack(batch._raw_rows[:251])
    assert_near(raw[:1], reference.logits([*texts[0], 4])[-1:])
    assert_near(raw[1:], reference.logits(texts[1]))
    batch = batch_of([Step(2, 0, texts[2]), Step(3, 0, texts[3])], len(VOCAB))
    engine.forward(batch)
    assert batch.deferred == {0, 1}
    # The deferred tokens were not taken: each session goes on from where it was once there is room.
    engine.close_session(1)
    (logits,) = forward(engine, Step(2, 0, texts[2]))
    assert_near(logits, reference.logits(texts[2])[-1:])
    engine.close()


def test_a_step_that_cannot_be_is_failed_and_the_others_run(model: Path, reference: Reference) -> None:
    engine = started(model, n_ctx=300)
    for slot in range(4):
        engine.open_session(slot, b"")
    steps = [Step(0, 3, [1]), Step(1, 0, [4, 5, 6], ALL), Step(2, 0, [1] * 301), Step(3, 0, [1, len(VOCAB)])]
    batch = batch_of(steps, len(VOCAB))
    engine.forward(batch)
    assert batch.failed == {
        0: "its first token is at position 3; the session has 0 tokens",
        2: "the session would have 301 tokens; n_ctx is 300, and the model's own context 1024",
        3: f"it has a token outside the vocabulary of {len(VOCAB)}",
    }
    assert batch.finish() == [0, 4, 5]
    assert_near(np.stack(batch._raw_rows[1:4]), reference.logits([4, 5, 6]))
    with pytest.raises(ValueError, match="rewind to 4 of the session in slot 1, which has 3 tokens"):
        engine.rewind(1, 4)
    engine.close()


def test_sampled_and_raw_outputs_of_one_batch(engine: LlamaCpp, reference: Reference) -> None:
    tokens = random_tokens(90)
    engine.open_session(0, b"")
    engine.open_session(1, b"")
    (raw,) = forward(engine, Step(0, 0, tokens, ALL))
    batch = batch_of([Step(1, 0, tokens, ALL)], len(VOCAB), SamplingParams())
    engine.forward(batch)
    assert batch.finish() == []
    assert batch.token_ids.tolist() == raw.argmax(axis=1).tolist()


def test_greedy_tokens_without_their_log_probabilities_are_the_same(engine: LlamaCpp, model: Path) -> None:
    without = started(model, logprobs=False)
    try:
        steps = [Step(slot, 0, random_tokens(5, slot)) for slot in range(3)]
        found = []
        for each in (engine, without):
            for slot in range(3):
                each.open_session(slot, b"")
            batch = batch_of(steps, len(VOCAB), SamplingParams())
            each.forward(batch)
            assert batch.finish() == []
            found.append((batch.token_ids.tolist(), np.isnan(batch.logprobs).tolist()))
        (tokens, known), (same, unknown) = found
        assert tokens == same
        assert (known, unknown) == ([False] * 3, [True] * 3)
        # What is drawn needs the rows, and has them.
        drawn = batch_of([Step(0, 5, [1])], len(VOCAB), SamplingParams(temperature=1.0, seed=3))
        without.forward(drawn)
        assert not np.isnan(drawn.logprobs).any()
    finally:
        without.close()


def test_nothing_is_printed(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    started(model).close()
    assert capfd.readouterr() == ("", "")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=f"there is no GGUF file {tmp_path}/none.gguf"):
        LlamaCpp(str(tmp_path / "none.gguf"))


def test_what_llama_cpp_cannot_load_is_refused_and_why_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"PK\3\4 something else")
    with pytest.raises(EngineStartError, match=f"llama.cpp cannot load {broken}; the lines above say why"):
        LlamaCpp(str(broken))
    assert "magic" in capfd.readouterr().err


def test_more_sessions_than_llama_cpp_holds_are_refused(model: Path) -> None:
    with pytest.raises(EngineStartError, match="max_sessions is 129; llama.cpp holds at most 128 of this model's"):
        started(model, max_sessions=129)


def test_a_path_is_required() -> None:
    from shmsched.engine.spec import EngineSpec

    with pytest.raises(EngineSpecError, match=r"missing a required argument: 'path'"):
        EngineSpec.parse("llama_cpp").load()


@pytest.mark.usefixtures("no_leftovers")
def test_a_daemon_serves_it(model: Path, reference: Reference) -> None:
    with (
        shmsched.launch(f"llama_cpp:{model}?n_ctx=512&threads=1&max_sessions=2") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        tokens = session.model.tokenizer.encode("Hello world", bos=True)
        raw = session.submit(tokens, sampling=None, output_rows=ALL).result(timeout=60)
        assert_near(raw.logits.copy(), reference.logits(tokens))
        again = session.submit([7, 8], position=3, sampling=None).result(timeout=60)
        assert_near(again.logits.copy(), reference.logits([*tokens[:3], 7, 8])[-1:])

"""The torch engine on a tiny Llama that is made here, against transformers' own forward pass over whole texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from drive import Floats, Step, batch_of, forward

import shmsched
from shmsched.errors import EngineStartError
from shmsched.params import OutputRows, SamplingParams
from shmsched.scheduling.params import SchedulerParams

for package in ("torch", "transformers"):
    pytest.importorskip(package, reason="needs the torch extra: pip install 'shmsched[torch]'")

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from shmsched.workers.torch_causal_lm import TorchCausalLM

ALL, LAST, NONE = OutputRows.ALL, OutputRows.LAST, OutputRows.NONE
VOCAB = 128
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,  # so that attention picks out tokens, and a wrong key shows
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 16


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every token sees all before it in the one, in the other only those of a sliding window."""
    torch.manual_seed(0)
    made = (
        LlamaForCausalLM(LlamaConfig(**SHAPE))
        if request.param == "llama"
        else MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=WINDOW))
    )
    path = tmp_path_factory.mktemp("torch") / f"tiny-{request.param}"
    made.save_pretrained(path)
    return path


@pytest.fixture
def engine(model: Path) -> TorchCausalLM:
    return started(model)


def started(model: Path, **options: int | str) -> TorchCausalLM:
    engine = TorchCausalLM(str(model), threads=1, **options)
    engine.start(SchedulerParams())
    return engine


class Reference:
    def __init__(self, engine: TorchCausalLM) -> None:
        self._model = engine._model

    def logits(self, tokens: list[int]) -> Floats:
        with torch.inference_mode():
            return self._model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def random_tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


def assert_near(logits: Floats, expected: Floats) -> None:
    np.testing.assert_allclose(logits, expected, atol=2e-3 * np.abs(expected).max())


def test_info_is_known_before_the_weights_are_read(model: Path) -> None:
    info = TorchCausalLM(str(model), max_sessions=3).info
    assert info.model == model.name
    assert (info.vocab_size, info.max_sessions, info.max_session_tokens, info.stop_tokens) == (VOCAB, 3, 512, (2,))


def test_a_mixed_batch_gives_each_row_its_logits(engine: TorchCausalLM) -> None:
    reference = Reference(engine)
    texts = [random_tokens(n, seed) for seed, n in enumerate((60, 33, 90, 30, 1))]
    for slot in range(5):
        engine.open_session(slot, b"")
    forward(engine, Step(0, 0, texts[0][:-1], NONE), Step(1, 0, texts[1][:-1]), Step(2, 0, texts[2][:50], NONE))
    found = forward(
        engine,
        Step(0, 59, texts[0][-1:]),
        Step(1, 32, texts[1][-1:]),
        Step(4, 0, texts[4]),
        Step(2, 50, texts[2][50:], ALL),
        Step(3, 0, texts[3]),
    )
    for i, text in enumerate((texts[0], texts[1], texts[4], texts[2], texts[3])):
        assert_near(found[i], reference.logits(text)[-len(found[i]) :])


def test_decodes_of_one_batch_run_together(engine: TorchCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for slot, n in enumerate((17, 20, 31, 60)):
        engine.open_session(slot, b"")
        forward(engine, Step(slot, 0, random_tokens(n)))
    shapes = []
    run = engine._run
    monkeypatch.setattr(engine, "_run", lambda slots, *rest: shapes.append(len(slots)) or run(slots, *rest))
    forward(engine, Step(0, 17, [1]), Step(1, 20, [1]), Step(3, 60, [1]), Step(2, 31, [1]))
    assert sorted(shapes) == [1, 3], "three are of 16 to 31 tokens; the fourth would have them padded to twice that"


@pytest.mark.parametrize("seed", range(4))
def test_any_batching_interleaving_rewinding_and_forking_gives_the_same_logits(
    engine: TorchCausalLM, seed: int
) -> None:
    reference = Reference(engine)
    rng = np.random.default_rng(seed)
    held: dict[int, list[int]] = {}
    forks = rewinds = 0
    for _ in range(80):
        slot = int(rng.integers(6))
        others = [s for s in held if s != slot and held[s]]
        action = rng.random()
        if slot in held and action < 0.1:
            engine.close_session(slot)
            del held[slot]
        elif slot in held and action < 0.4:
            rewinds += 1
            held[slot] = held[slot][: int(rng.integers(0, len(held[slot]) + 1))]
            engine.rewind(slot, len(held[slot]))
        elif slot not in held and others and action < 0.6:
            forks += 1
            parent = others[int(rng.integers(len(others)))]
            held[slot] = held[parent][: int(rng.integers(0, len(held[parent]) + 1))]
            engine.fork_session(parent, slot, len(held[slot]))
        elif slot not in held:
            engine.open_session(slot, b"")
            held[slot] = []
        steps = []
        for s in held:
            if rng.random() < 0.7 and len(held[s]) < 130:
                n = int(rng.choice([1, 1, 1, 2, 30]))
                steps.append(Step(s, len(held[s]), random_tokens(n, seed=int(rng.integers(10**6)))))
        if not steps:
            continue
        for step, logits in zip(steps, forward(engine, *steps), strict=True):
            held[step.slot] = [*held[step.slot], *step.tokens]
            assert_near(logits, reference.logits(held[step.slot])[-1:])
    assert forks
    assert rewinds


def test_sampled_outputs_are_the_greedy_tokens(engine: TorchCausalLM) -> None:
    tokens = random_tokens(90)
    engine.open_session(0, b"")
    batch = batch_of([Step(0, 0, tokens, ALL)], VOCAB, SamplingParams())
    engine.forward(batch)
    assert batch.finish() == []
    assert batch.token_ids.tolist() == Reference(engine).logits(tokens).argmax(axis=1).tolist()


def test_a_step_that_cannot_be_is_failed_and_the_others_run(model: Path) -> None:
    engine = started(model, max_session_tokens=8)
    for slot in range(3):
        engine.open_session(slot, b"")
    batch = batch_of([Step(0, 0, [1] * 9), Step(1, 0, [4, 5]), Step(2, 0, [VOCAB])], VOCAB)
    engine.forward(batch)
    assert batch.failed == {
        0: "the session would have 9 tokens; max_session_tokens is 8",
        2: f"it has a token outside the vocabulary of {VOCAB}",
    }
    assert batch.finish() == [0, 2]
    assert_near(batch._raw_rows[1], Reference(engine).logits([4, 5])[-1])


def test_a_rewind_or_fork_beyond_what_is_held_is_refused(engine: TorchCausalLM) -> None:
    engine.open_session(0, b"")
    forward(engine, Step(0, 0, [1, 2]))
    with pytest.raises(ValueError, match="rewind to 3 of the session in slot 0, which has 2 tokens"):
        engine.rewind(0, 3)
    with pytest.raises(ValueError, match="fork of 3 tokens of the session in slot 0, which has 2"):
        engine.fork_session(0, 1, 3)


def test_half_precision_gives_float32_logits(model: Path) -> None:
    engine = started(model, dtype="bfloat16")
    engine.open_session(0, b"")
    (logits,) = forward(engine, Step(0, 0, random_tokens(20)))
    expected = Reference(started(model)).logits(random_tokens(20))[-1]
    assert np.corrcoef(logits[0], expected)[0, 1] > 0.98


def test_what_cannot_be_served_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(EngineStartError, match=f"torch: {tmp_path} has no config.json"):
        TorchCausalLM(str(tmp_path))
    with pytest.raises(EngineStartError, match="torch: dtype is 'f33'"):
        TorchCausalLM(str(model), dtype="f33")


def test_a_model_with_a_recurrent_state_is_refused(tmp_path: Path) -> None:
    from transformers import MambaConfig

    MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(EngineStartError, match="is a mamba model, which keeps a recurrent state"):
        TorchCausalLM(str(tmp_path))


@pytest.mark.usefixtures("no_leftovers")
def test_a_daemon_serves_it(model: Path) -> None:
    with (
        shmsched.launch(f"torch:{model}?threads=1&max_sessions=2") as cluster,
        cluster.client() as client,
        client.open_session() as session,
    ):
        expected = Reference(started(model))
        raw = session.submit([1, 2, 3], sampling=None, output_rows=ALL).result(timeout=60)
        assert_near(raw.logits.copy(), expected.logits([1, 2, 3]))
        again = session.submit([7, 8], position=2, sampling=None).result(timeout=60)
        assert_near(again.logits.copy(), expected.logits([1, 2, 7, 8])[-1:])

"""The gemma engine on a tiny random model, against a plain forward pass."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from drive import Step, assert_close, batch_of, forward
from tiny import VOCAB, Reference, write_model

from shmsched.errors import EngineStartError
from shmsched.params import OutputRows, SamplingParams
from shmsched.scheduling.params import SchedulerParams
from shmsched.workers.gemma import Gemma
from shmsched.workers.gemma import linear as gemma_linear
from shmsched.workers.gemma.kv_blocks import BLOCK_TOKENS, KvBlocks
from shmsched.workers.gemma.model import GemmaModel
from shmsched.workers.gguf.file import GgufError

ALL, LAST, NONE = OutputRows.ALL, OutputRows.LAST, OutputRows.NONE


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gemma")


@pytest.fixture(scope="module")
def model(directory: Path) -> Path:
    return write_model(directory / "tiny.gguf")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture
def engine(model: Path, directory: Path) -> Gemma:
    return started(model, directory)


def started(model: Path, directory: Path, **options: int) -> Gemma:
    engine = Gemma(str(model), cache=str(directory), **options)
    engine.start(SchedulerParams())
    return engine


def random_tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, len(VOCAB), n).tolist()


def test_info_is_known_before_the_weights_are_read(model: Path, tmp_path: Path) -> None:
    info = Gemma(str(model), cache=str(tmp_path), max_sessions=3, max_session_tokens=100_000).info
    assert dataclasses.asdict(info) == {
        "model": "tiny-gemma",
        "vocab_size": len(VOCAB),
        "max_sessions": 3,
        "max_session_tokens": 1024,  # the model's context
        "max_batch_size": None,
        "max_decode_sequences": None,
        "max_prefill_chunk_size": None,
        "tokenizer": f"gguf:{model}",
        "rewinds_anywhere": True,
        "stop_tokens": (1, 5),
    }
    assert list(tmp_path.iterdir()) == []


def test_one_prefill_equals_the_reference(engine: Gemma, reference: Reference) -> None:
    # Longer than the window, than a block of the cache, than a tile of queries, than the head takes at once.
    tokens = random_tokens(BLOCK_TOKENS + 50)
    engine.open_session(0, b"")
    (logits,) = forward(engine, Step(0, 0, tokens, ALL))
    assert_close(logits, reference.logits(tokens))


def test_decoding_equals_the_reference(engine: Gemma, reference: Reference) -> None:
    tokens = random_tokens(BLOCK_TOKENS + 20)
    engine.open_session(0, b"")
    rows = [forward(engine, Step(0, i, [token]))[0][0] for i, token in enumerate(tokens)]
    assert_close(rows, reference.logits(tokens))


@pytest.mark.parametrize("seed", range(6))
def test_any_batching_chunking_interleaving_and_rewinding_gives_the_same_logits(
    engine: Gemma, reference: Reference, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    n_sessions = 9
    texts = [random_tokens(int(rng.integers(30, 330)), seed=100 * seed + i) for i in range(n_sessions)]
    lengths = [0] * n_sessions
    found: list[dict[int, np.ndarray]] = [{} for _ in texts]

    def check(i: int) -> None:
        expected = reference.logits(texts[i][: lengths[i]])
        assert_close(list(found[i].values()), [expected[position] for position in found[i]])

    for slot in range(n_sessions):
        engine.open_session(slot, b"")
    rewinds = 0
    while any(lengths[i] < len(texts[i]) for i in range(n_sessions)):
        steps = []
        for i in rng.permutation(n_sessions).tolist():
            left = len(texts[i]) - lengths[i]
            if not left or rng.random() < 0.2:
                continue
            if rewinds < 12 and lengths[i] and rng.random() < 0.1:
                # What follows is another text: what the cache held behind that place must not be seen.
                check(i)
                rewinds += 1
                lengths[i] = int(rng.integers(0, lengths[i]))
                engine.rewind(i, lengths[i])
                texts[i][lengths[i] :] = random_tokens(len(texts[i]) - lengths[i], seed=rewinds + 1000 * seed)
                found[i] = {position: row for position, row in found[i].items() if position < lengths[i]}
                left = len(texts[i]) - lengths[i]
            n = min(left, int(rng.choice([1, 1, 1, 2, 3, 7, 40, 130])))
            rows = ALL if n < 40 else rng.choice([LAST, NONE])
            steps.append(Step(i, lengths[i], texts[i][lengths[i] : lengths[i] + n], OutputRows(rows)))
        if not steps:
            continue
        for step, logits in zip(steps, forward(engine, *steps), strict=True):
            lengths[step.slot] += len(step.tokens)
            for k, row in enumerate(logits):
                found[step.slot][lengths[step.slot] - len(logits) + k] = row
    assert rewinds
    for i in range(n_sessions):
        check(i)


def test_a_local_layer_sees_exactly_its_window(tmp_path: Path) -> None:
    window, n_layers = 8, 2
    engine = started(write_model(tmp_path / "local.gguf", n_layers=n_layers, window=window, pattern=6), tmp_path)
    tokens = random_tokens(40)
    changed = [tokens[0] + 1, *tokens[1:]]
    engine.open_session(0, b"")
    engine.open_session(1, b"")
    one, other = forward(engine, Step(0, 0, tokens, ALL), Step(1, 0, changed, ALL))
    reach = n_layers * (window - 1)
    assert np.abs(one[: reach + 1] - other[: reach + 1]).max(axis=1).min() > 1e-3
    np.testing.assert_allclose(one[reach + 1 :], other[reach + 1 :], atol=1e-5)


def test_a_global_layer_sees_everything(tmp_path: Path) -> None:
    engine = started(write_model(tmp_path / "global.gguf", n_layers=1, window=8, pattern=1), tmp_path)
    tokens = random_tokens(40)
    engine.open_session(0, b"")
    engine.open_session(1, b"")
    one, other = forward(engine, Step(0, 0, tokens), Step(1, 0, [tokens[0] + 1, *tokens[1:]]))
    assert np.abs(one - other).max() > 1e-6


def test_a_slot_used_again_begins_empty(engine: Gemma, reference: Reference) -> None:
    for seed in (1, 2):
        tokens = random_tokens(40, seed)
        engine.open_session(0, b"")
        (logits,) = forward(engine, Step(0, 0, tokens))
        assert_close(logits, reference.logits(tokens)[-1:])
        engine.close_session(0)


def test_sampled_outputs_are_the_greedy_tokens(engine: Gemma, reference: Reference) -> None:
    tokens = random_tokens(90)
    engine.open_session(0, b"")
    batch = batch_of([Step(0, 0, tokens, ALL)], len(VOCAB), SamplingParams())
    engine.forward(batch)
    assert batch.token_ids.tolist() == reference.logits(tokens).argmax(axis=1).tolist()


def test_only_wanted_rows_go_through_the_head(engine: Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    logits = GemmaModel.logits
    monkeypatch.setattr(GemmaModel, "logits", lambda self, x, out: rows.append(len(x)) or logits(self, x, out))
    for slot in range(4):
        engine.open_session(slot, b"")
    forward(
        engine, Step(0, 0, [7]), Step(1, 0, random_tokens(50)), Step(2, 0, [1, 2, 3], ALL), Step(3, 0, [5, 6], NONE)
    )
    assert sum(rows) == 5
    rows.clear()
    forward(engine, Step(3, 2, random_tokens(20), NONE))
    assert rows == []
    forward(engine, Step(3, 22, random_tokens(150), ALL))
    assert sum(rows) == 150
    assert max(rows) <= 64  # memory for logits is bounded


def test_steps_without_room_are_deferred_and_the_others_run(model: Path, directory: Path, reference: Reference) -> None:
    engine = started(model, directory, kv_tokens=2 * BLOCK_TOKENS)
    texts = [random_tokens(BLOCK_TOKENS, seed) for seed in range(3)]
    for slot in range(3):
        engine.open_session(slot, b"")
    forward(engine, Step(0, 0, texts[0]))
    # One block is left: the first two steps want another one each.
    steps = [Step(1, 0, texts[1], ALL), Step(0, BLOCK_TOKENS, [4]), Step(2, 0, texts[2])]
    batch = batch_of(steps, len(VOCAB))
    engine.forward(batch)
    assert batch.deferred == {1, 2}
    assert batch.finish() == [BLOCK_TOKENS, BLOCK_TOKENS + 1]
    assert_close(np.stack(batch._raw_rows[:BLOCK_TOKENS]), reference.logits(texts[1]))
    # The deferred tokens were not taken: the session goes on from where it was once there is room.
    engine.close_session(1)
    (logits,) = forward(engine, steps[1])
    assert_close(logits, reference.logits([*texts[0], 4])[-1:])
    # Rewinding gives room, too.
    engine.rewind(0, BLOCK_TOKENS)
    (logits,) = forward(engine, steps[2])
    assert_close(logits, reference.logits(texts[2])[-1:])


def test_a_batch_with_no_room_at_all_defers_every_step(model: Path, directory: Path) -> None:
    engine = started(model, directory, kv_tokens=1)
    engine.open_session(0, b"")
    engine.open_session(1, b"")
    forward(engine, Step(0, 0, [1]))
    batch = batch_of([Step(1, 0, [1, 2])], len(VOCAB))
    engine.forward(batch)
    assert batch.deferred == {0}


def test_a_step_that_cannot_be_is_failed_and_the_others_run(model: Path, directory: Path, reference: Reference) -> None:
    engine = started(model, directory, max_session_tokens=8)
    for slot in range(5):
        engine.open_session(slot, b"")
    steps = [
        Step(0, 3, [1]),
        Step(1, 0, [4, 5, 6], ALL),
        Step(2, 0, [1] * 9, ALL),
        Step(3, 0, [1, len(VOCAB)]),
        Step(4, 0, [7, 8]),
    ]
    batch = batch_of(steps, len(VOCAB))
    engine.forward(batch)
    assert batch.failed == {
        0: "its first token is at position 3; the session has 0 tokens",
        2: "the session would have 9 tokens; max_session_tokens is 8",
        3: f"it has a token outside the vocabulary of {len(VOCAB)}",
    }
    assert batch.finish() == [0, *range(4, 14)]
    assert_close(np.stack(batch._raw_rows[1:4]), reference.logits([4, 5, 6]))
    assert_close([batch._raw_rows[14]], reference.logits([7, 8])[-1:])
    forward(engine, Step(0, 0, [1]), Step(2, 0, [1] * 8))


def test_rewinding_forward_is_refused(engine: Gemma) -> None:
    engine.open_session(0, b"")
    forward(engine, Step(0, 0, [1, 2]))
    with pytest.raises(ValueError, match="rewind to 3 of the session in slot 0, which has 2 tokens"):
        engine.rewind(0, 3)


def test_blocks_come_back() -> None:
    kv = KvBlocks(4, 1, 1, 2)
    assert kv.reserve(0, 0, 3 * BLOCK_TOKENS)
    assert not kv.reserve(1, 0, BLOCK_TOKENS + 1)
    assert kv.n_free == 1  # a refusal takes nothing
    kv.truncate(0, BLOCK_TOKENS + 1)
    assert kv.n_free == 2
    assert kv.reserve(1, 0, BLOCK_TOKENS + 1)
    kv.truncate(0, 0)
    kv.truncate(1, 0)
    assert kv.n_free == 4


@pytest.mark.parametrize("length", [0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 30, BLOCK_TOKENS + 40])
@pytest.mark.parametrize("first", ["parent", "child", "both at once"])
def test_a_fork_and_its_parent_are_independent(engine: Gemma, reference: Reference, length: int, first: str) -> None:
    text = random_tokens(BLOCK_TOKENS + 40)
    mine, other = random_tokens(9, seed=1), random_tokens(9, seed=2)
    engine.open_session(0, b"")
    forward(engine, Step(0, 0, text))
    engine.fork_session(0, 5, length)
    steps = [Step(0, len(text), mine, ALL), Step(5, length, other, ALL)]
    if first == "both at once":
        parent, child = forward(engine, *steps)
    else:
        order = steps if first == "parent" else steps[::-1]
        by_slot = {step.slot: forward(engine, step)[0] for step in order}
        parent, child = by_slot[0], by_slot[5]
    assert_close(parent, reference.logits([*text, *mine])[-9:])
    assert_close(child, reference.logits([*text[:length], *other])[-9:])
    # Rewound into what they share, either writes to its own.
    for slot, rest in ((5, mine), (0, other)):
        engine.rewind(slot, length // 2)
        (logits,) = forward(engine, Step(slot, length // 2, rest))
        assert_close(logits, reference.logits([*text[: length // 2], *rest])[-1:])
    engine.close_session(0)
    (logits,) = forward(engine, Step(5, length // 2 + 9, [4]))
    assert_close(logits, reference.logits([*text[: length // 2], *mine, 4])[-1:])


def test_forks_share_blocks_until_they_write(model: Path, directory: Path) -> None:
    engine = started(model, directory, kv_tokens=4 * BLOCK_TOKENS)
    text = random_tokens(2 * BLOCK_TOKENS + 1)
    engine.open_session(0, b"")
    forward(engine, Step(0, 0, text))
    for slot in (1, 2):
        engine.fork_session(0, slot, len(text))
    forward(engine, Step(1, len(text), [4]))
    batch = batch_of([Step(2, len(text), [4])], len(VOCAB))
    engine.forward(batch)
    assert batch.deferred == {0}, "three sessions share two blocks, and there is no third copy of the last"
    engine.close_session(0)
    forward(engine, Step(2, len(text), [4]))  # the last that has a block writes where it is
    engine.close_session(1)
    engine.close_session(2)
    assert engine._kv.n_free == 4


def test_a_fork_beyond_its_parent_is_refused(engine: Gemma) -> None:
    engine.open_session(0, b"")
    forward(engine, Step(0, 0, [1, 2]))
    with pytest.raises(ValueError, match="fork of 3 tokens of the session in slot 0, which has 2"):
        engine.fork_session(0, 1, 3)


@pytest.mark.parametrize("n", [*range(1, 20), 33, 70])
def test_products_are_the_same_for_any_number_of_rows(n: int) -> None:
    rng = np.random.default_rng(n)
    x, weights = rng.normal(size=(n, 12)).astype("f4"), rng.normal(size=(12, 20_000)).astype("f4")
    np.testing.assert_allclose(gemma_linear.widen(x, weights), x @ weights, atol=1e-4)
    out = np.full((gemma_linear.padded(n), 20_000), np.nan, np.float32)
    assert gemma_linear.widen(x, weights, out).base is out
    np.testing.assert_allclose(out[:n], x @ weights, atol=1e-4)
    np.testing.assert_allclose(gemma_linear.narrow(x, weights.T.copy()), x @ weights, atol=1e-4)


def test_threads_limit_blas(model: Path, directory: Path) -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl", reason="threads= needs threadpoolctl")
    with threadpoolctl.threadpool_limits():
        started(model, directory, threads=1)
        assert {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"} == {1}


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return tmp_path / "broken.gguf"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=f"there is no GGUF file {tmp_path}/none.gguf"):
        Gemma(str(tmp_path / "none.gguf"))


def test_what_is_not_gguf_is_refused(broken: Path) -> None:
    broken.write_bytes(b"PK\3\4 something else")
    with pytest.raises(GgufError, match=r"broken.gguf is not a whole GGUF file: it begins with b'PK"):
        Gemma(str(broken))


@pytest.mark.parametrize(
    ("n_bytes", "message"),
    [
        (0, r"cannot read the GGUF file .*/broken\.gguf"),
        (100, r"broken\.gguf is not a whole GGUF file: it ends at byte 100, within its header"),
        (3000, "it ends at byte 3000, within its header"),
        (-1, "tensor .* ends at byte"),
    ],
)
def test_a_truncated_gguf_file_is_refused(model: Path, broken: Path, n_bytes: int, message: str) -> None:
    broken.write_bytes(model.read_bytes()[:n_bytes])
    with pytest.raises(GgufError, match=message):
        Gemma(str(broken))


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "gemma2.gguf", architecture="gemma2")
    with pytest.raises(GgufError, match="architecture 'gemma2'; this engine runs 'gemma3'"):
        Gemma(str(path))


def test_negative_options_are_refused(model: Path) -> None:
    with pytest.raises(EngineStartError, match="kv_tokens is -1"):
        Gemma(str(model), kv_tokens=-1)

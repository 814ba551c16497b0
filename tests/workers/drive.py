"""Driving an engine in process, as its host would: batches made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shmsched.engine import BatchView, Engine, StepRow
from shmsched.params import OutputRows, SamplingParams

Floats = npt.NDArray[np.float32]


class Step(NamedTuple):
    slot: int
    position: int
    tokens: Sequence[int]
    output_rows: OutputRows = OutputRows.LAST


def batch_of(steps: Sequence[Step], vocab_size: int, sampling: SamplingParams | None = None) -> BatchView:
    """Raw logits of every output are wanted; with ``sampling``, tokens."""
    rows, outputs, start = [], [], 0
    for step in steps:
        n = len(step.tokens)
        rows.append(StepRow(step.slot, start, n))
        outputs += range(start + n - step.output_rows.count(n), start + n)
        start += n
    raw = [np.full(vocab_size, np.nan, np.float32) if sampling is None else None for _ in outputs]
    return BatchView(
        np.concatenate([np.asarray(step.tokens, np.int32) for step in steps]),
        np.concatenate([np.arange(s.position, s.position + len(s.tokens), dtype=np.int32) for s in steps]),
        rows,
        np.asarray(outputs, np.int32),
        [sampling] * len(outputs),
        raw,
        vocab_size,
    )


def forward(engine: Engine, *steps: Step) -> list[Floats]:
    """Run the steps in one batch; the logits of each step's output rows."""
    batch = batch_of(steps, engine.info.vocab_size)
    engine.forward(batch)
    assert not batch.deferred
    assert not batch.failed
    assert batch.finish() == []
    logits = np.reshape([row for row in batch._raw_rows if row is not None], (-1, engine.info.vocab_size))
    ends = np.cumsum([step.output_rows.count(len(step.tokens)) for step in steps])
    return np.split(logits, ends[:-1])


def greedy(engine: Engine, slot: int, prompt: Sequence[int], n_tokens: int) -> list[int]:
    """Open a session, prefill it and decode: the tokens that follow the prompt."""
    engine.open_session(slot, b"")
    found: list[int] = []
    tokens: Sequence[int] = prompt
    position = 0
    for _ in range(n_tokens):
        batch = batch_of([Step(slot, position, tokens)], engine.info.vocab_size, SamplingParams())
        engine.forward(batch)
        position += len(tokens)
        tokens = [int(batch.token_ids[-1])]
        found += tokens
    engine.close_session(slot)
    return found


def assert_close(logits: Mapping[int, Floats] | Sequence[Floats], expected: Sequence[Floats]) -> None:
    """The top 10 of each row are the same to 1e-3 of their size."""
    for found, wanted in zip(logits, expected, strict=True):
        top = np.argsort(wanted)[-10:]
        np.testing.assert_allclose(found[top], wanted[top], rtol=1e-3)

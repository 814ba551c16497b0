"""Generations that the client samples itself, from rows of logits in shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shmsched
from shmsched.client.generation import FinishReason, PromptLookup
from shmsched.workers.echo import advance, answer

from processes.expected import VOCAB, echoes
from processes.ways import ENGINES


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


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (lambda row: None, "returned None; "),
        (lambda row: "x", "returned 'x'; "),
        (lambda row: [[1.0], [1.0, 2.0]], r"returned \[\[1.0\], \[1.0, 2.0\]\]; "),
        (lambda row: row[:3], r"returned an array of float32 \(3,\); "),
        (lambda row: row.astype(int), rf"returned an array of int64 \({VOCAB},\); "),
    ],
)
def test_what_a_processor_returned_and_what_is_wanted_is_said(session: shmsched.Session, gives: Any, said: str) -> None:
    wanted = rf"logits processor {said}a row of floats of shape \({VOCAB},\) is wanted"
    with pytest.raises(shmsched.InvalidRequest, match=wanted):
        list(session.generate([1], max_new_tokens=2, logits_processor=lambda tokens, row: gives(row)))


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

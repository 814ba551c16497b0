"""The three ways of giving results give the same; what cannot be is refused at the call; what is missing is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmsched.engine import BatchView, StepRow
from shmsched.engine.sampling import sample
from shmsched.params import SamplingParams

VOCAB = 9
Floats = npt.NDArray[np.float32]
SAMPLED = SamplingParams(1.0, seed=3)


def batch(sampling: list[SamplingParams | None]) -> BatchView:
    """One session for each output, two tokens each, the last of which has the output."""
    n = len(sampling)
    raw = [np.full(VOCAB, np.nan, np.float32) if s is None else None for s in sampling]
    return BatchView(
        np.arange(2 * n, dtype=np.int32),
        np.tile(np.array([40, 41], np.int32), n),
        [StepRow(i, 2 * i, 2) for i in range(n)],
        np.arange(1, 2 * n, 2, dtype=np.int32),
        sampling,
        raw,
        VOCAB,
    )


def logits(n: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(0, 2, (n, VOCAB)).astype(np.float32)


def by_rows(view: BatchView, rows: Floats) -> None:
    for k in range(len(view.rows)):
        view.rows[k][:] = rows[k]


def at_once(view: BatchView, rows: Floats) -> None:
    view.put_logits(0, rows)


def in_pieces(view: BatchView, rows: Floats) -> None:
    for k in reversed(range(len(rows))):
        view.put_logits(k, rows[k : k + 1])


def in_another_type(view: BatchView, rows: Floats) -> None:
    view.put_logits(0, np.asfortranarray(rows.astype(np.float64)))


@pytest.mark.parametrize("give", [by_rows, at_once, in_pieces, in_another_type])
@given(sampling=st.lists(st.sampled_from([None, SamplingParams(), SAMPLED]), min_size=1, max_size=5))
def test_logits_given_either_way_give_the_same(
    give: Callable[[BatchView, Floats], None], sampling: list[SamplingParams | None]
) -> None:
    rows = logits(len(sampling))
    view = batch(sampling)
    give(view, rows)
    rows_before = rows.copy()
    rows[:] = 0  # the engine may use its buffer again: what was given is taken
    assert view.finish() == []
    for k, params in enumerate(sampling):
        if params is None:
            np.testing.assert_array_equal(view._raw_rows[k], rows_before[k])
            assert view.token_ids[k] == -1
        else:
            ids, logprobs = sample(rows_before[k : k + 1], [params], np.array([41]))
            assert view.token_ids[k] == ids[0]
            assert view.logprobs[k] == pytest.approx(logprobs[0], abs=1e-5)


def test_tokens_that_the_engine_sampled_are_taken_as_they_are() -> None:
    view = batch([SAMPLED] * 4)
    view.set_tokens(0, [5])
    view.set_tokens(1, np.array([6, 7], np.uint16), np.array([-0.5, -1.5], np.float32))
    view.set_tokens(3, (8,), (-2.0,))
    assert view.finish() == []
    assert view.token_ids.tolist() == [5, 6, 7, 8]
    np.testing.assert_array_equal(view.logprobs, np.array([np.nan, -0.5, -1.5, -2.0], np.float32))


@pytest.mark.parametrize(
    "ids", [[5, 6], (5, 6), np.array([5, 6]), np.array([5, 6], np.uint64), np.array([5.0, 6.0]), [5.0, 6.0]]
)
@pytest.mark.parametrize("logprobs", [[-1.0, -1e300], np.array([-1.0, -np.inf]), np.array([-1, -np.inf], np.float32)])
def test_tokens_of_all_outputs_at_once_may_have_any_type(ids: Any, logprobs: Any) -> None:
    view = batch([SAMPLED] * 2)
    with np.errstate(over="ignore"):
        view.set_tokens(0, ids, logprobs)
    ids, logprobs = None, None
    assert view.finish() == []
    assert (view.token_ids.dtype, view.token_ids.tolist()) == (np.int64, [5, 6])
    assert (view.logprobs.dtype, view.logprobs.tolist()) == (np.float32, [-1.0, -np.inf])


def test_tokens_of_all_outputs_at_once_are_taken_then_and_there() -> None:
    view = batch([SAMPLED] * 2)
    mine = [5, 6]
    view.set_tokens(0, mine)
    mine[0] = 9
    assert view.token_ids.tolist() == [5, 6]
    assert np.isnan(view.logprobs).all()
    view.set_tokens(0, [2**40, -1], [-1.0, -2.0])
    assert view.token_ids.tolist() == [2**40, -1]
    with pytest.raises((ValueError, TypeError)):
        view.set_tokens(0, ["a", "b"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="broadcast"):
        view.set_tokens(0, [1, 2], [-1.0, -2.0, -3.0])


def test_the_last_word_counts_also_after_all_were_given_at_once() -> None:
    view = batch([SAMPLED] * 3)
    rows = logits(3)
    view.set_tokens(0, [5, 6, 7], [-1.0, -2.0, -3.0])
    view.set_tokens(0, [4, 3, 2])
    view.set_tokens(1, [8])
    view.rows[2][:] = rows[2]
    assert view.finish() == []
    expected = sample(rows[2:], [SAMPLED], np.array([41]))
    assert view.token_ids.tolist() == [4, 8, expected[0][0]]
    np.testing.assert_allclose(view.logprobs, [-1.0, -2.0, expected[1][0]], atol=1e-5)


def test_each_output_may_take_its_own_way_and_the_last_word_counts() -> None:
    view = batch([SAMPLED, SAMPLED, None, SAMPLED, SAMPLED])
    rows = logits(5)
    view.rows[0][:] = rows[0]
    view.set_tokens(1, [4])
    view.rows[2][:] = rows[2]
    view.rows[3][:] = -rows[3]
    view.put_logits(3, rows[3:4])
    view.rows[4][:] = rows[4]
    view.set_tokens(4, [2])
    assert view.finish() == []
    expected = sample(rows, [SAMPLED] * 5, np.full(5, 41))[0]
    assert view.token_ids.tolist() == [expected[0], 4, -1, expected[3], 2]


def test_what_nothing_was_given_for_is_reported() -> None:
    view = batch([SAMPLED, None, SAMPLED, None, SAMPLED])
    view.set_tokens(2, [1])
    view.put_logits(3, logits(1))
    assert view.finish() == [0, 1, 4]
    assert batch([]).finish() == []


def test_raw_rows_are_written_in_place() -> None:
    view = batch([None])
    assert view.rows[0] is view._raw_rows[0]
    assert view.rows[0].dtype == np.float32
    assert view.rows[0].shape == (VOCAB,)
    assert view.rows[0].flags.writeable


@pytest.mark.parametrize(
    ("k0", "shape"),
    [(0, (VOCAB,)), (0, (1, VOCAB + 1)), (0, (1, 1)), (0, (4, VOCAB)), (3, (1, VOCAB)), (-1, (1, VOCAB))],
)
def test_logits_that_do_not_fit_are_refused_and_change_nothing(k0: int, shape: tuple[int, ...]) -> None:
    view = batch([SAMPLED, None, SAMPLED])
    with pytest.raises(ValueError, match=r"put_logits\(.*wanted \(n, 9\) within 3 outputs"):
        view.put_logits(k0, np.zeros(shape, np.float32))
    assert view.finish() == [0, 1, 2]


@pytest.mark.parametrize(("k0", "n"), [(-1, 1), (0, 4), (3, 1), (4, 0)])
def test_tokens_that_do_not_fit_are_refused(k0: int, n: int) -> None:
    view = batch([SAMPLED] * 3)
    with pytest.raises(ValueError, match="this batch has 3 outputs"):
        view.set_tokens(k0, [1] * n)
    assert view.finish() == [0, 1, 2]


def test_tokens_where_logits_were_asked_for_are_refused() -> None:
    view = batch([SAMPLED, None])
    with pytest.raises(ValueError, match="output 1, which asks for raw logits"):
        view.set_tokens(0, [1, 2])
    assert view.finish() == [0, 1]


@pytest.mark.parametrize("i", [-1, 2])
def test_steps_and_rows_that_are_none(i: int) -> None:
    view = batch([SAMPLED, None])
    with pytest.raises(IndexError, match=f"step {i} of a batch of 2"):
        view.defer(i)
    with pytest.raises(IndexError, match=f"step {i} of a batch of 2"):
        view.fail(i, "why")
    with pytest.raises(IndexError, match=f"output {i} of a batch with 2"):
        view.rows[i]
    assert (view.deferred, view.failed) == (set(), {})


def test_deferred_and_failed_steps() -> None:
    view = batch([SAMPLED] * 3)
    view.defer(2)
    view.fail(0, "too hot")
    view.fail(1, ValueError("as an exception"))  # type: ignore[arg-type]
    assert view.deferred == {2}
    assert view.failed == {0: "too hot", 1: "as an exception"}

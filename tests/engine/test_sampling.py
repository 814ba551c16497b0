"""Tokens are drawn from the distribution that was asked for, and depend on nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmsched.engine.sampling import NO_TOKEN, UnusableLogits, candidates, fault_of, sample, uniform
from shmsched.params import SamplingParams

Floats = npt.NDArray[np.float64]
VOCAB = 12
LOGITS = [1.0, 3.5, -2.0, 3.5, 0.0, 2.0, -np.inf, 1.0, 3.0, -9.0, 2.0, 0.5]
INF = float("inf")


def exact(logits: Sequence[float], p: SamplingParams) -> Floats:
    """The probabilities by the textbook: cut to top_k, divide by the temperature, cut to top_p, lowest index first in ties."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = order[: p.top_k] if p.top_k else order
    weights = {i: math.exp((logits[i] - max(logits)) / p.temperature) for i in kept}
    total = sum(weights.values())
    mass, nucleus = 0.0, []
    for i in kept:
        nucleus.append(i)
        mass += weights[i] / total
        if p.top_p < 1.0 and mass >= p.top_p:
            break
    probabilities = np.zeros(len(logits))
    for i in nucleus:
        probabilities[i] = weights[i]
    return probabilities / probabilities.sum()


def draw(params: SamplingParams, seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.int64]:
    n = max(len(seeds), len(positions))
    rows = np.tile(np.array(LOGITS, np.float32), (n, 1))
    each = [SamplingParams(params.temperature, params.top_p, params.top_k, seed) for seed in seeds]
    return sample(rows, each * (n // len(each)), np.resize(positions, n))[0]


PARAMS = [
    SamplingParams(1.0),
    SamplingParams(0.5),
    SamplingParams(2.0),
    SamplingParams(1.0, top_k=1),
    SamplingParams(1.0, top_k=2),
    SamplingParams(1.5, top_k=5),
    SamplingParams(1.0, top_k=VOCAB),
    SamplingParams(1.0, top_k=10 * VOCAB),
    SamplingParams(1.0, top_p=0.3),
    SamplingParams(1.0, top_p=0.75),
    SamplingParams(2.0, top_p=0.9),
    SamplingParams(1.0, top_p=1e-6),
    SamplingParams(0.8, top_p=0.6, top_k=4),
]


@pytest.mark.parametrize("over", ["seeds", "positions"])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_the_distribution_is_the_exact_one(params: SamplingParams, over: str) -> None:
    n = 4000
    tokens = draw(params, range(n), [17]) if over == "seeds" else draw(params, [123], range(n))
    counts = np.bincount(tokens, minlength=VOCAB)
    expected = n * exact(LOGITS, params)
    assert not counts[expected == 0].any(), "a token that was cut off, or is impossible, was drawn"
    likely = expected > 0
    chi_square = float(((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum())
    freedom = int(likely.sum()) - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom)


def test_greedy_takes_the_lowest_index_of_a_tie() -> None:
    for params in (SamplingParams(), SamplingParams(top_k=3, top_p=0.5, seed=9), SamplingParams(1.0, top_k=1, seed=4)):
        assert draw(params, [5], [1]).tolist() == [1]


def test_a_temperature_near_nothing_is_greedy_without_a_tie() -> None:
    row = np.array([LOGITS], np.float32)
    row[0, 8] = 3.6
    for seed in range(50):
        assert sample(row, [SamplingParams(1e-30, seed=seed)], np.array([0]))[0].tolist() == [8]


@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(-30, 30, width=32), min_size=VOCAB, max_size=VOCAB),
            st.sampled_from([*PARAMS, SamplingParams()]),
            st.integers(0, 2**64 - 1),
            st.integers(0, 10**6),
        ),
        min_size=1,
        max_size=6,
    ),
    st.randoms(),
)
def test_neighbours_and_their_order_change_nothing(
    rows: list[tuple[list[float], SamplingParams, int, int]], random: object
) -> None:
    def run(some: list[tuple[list[float], SamplingParams, int, int]]) -> list[tuple[int, float]]:
        params = [SamplingParams(p.temperature, p.top_p, p.top_k, seed) for _, p, seed, _ in some]
        logits = np.array([row for row, *_ in some], np.float32)
        ids, logprobs = sample(logits, params, np.array([position for *_, position in some]))
        return list(zip(ids.tolist(), logprobs.tolist(), strict=True))

    alone = [run([row])[0] for row in rows]
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert run([rows[i] for i in order]) == [alone[i] for i in order]


@pytest.mark.parametrize("vocab", [300, 5000, 32000, 100_000, 262_147])
@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
def test_wide_rows_are_cut_and_drawn_as_the_textbook_says(vocab: int, spread: float) -> None:
    rng = np.random.default_rng(vocab)
    # One decimal: with ties at every cut.
    logits = np.round(rng.normal(0, spread, (3, vocab)), 1).astype(np.float32)
    choices = [
        SamplingParams(1.0),
        SamplingParams(0.7),
        SamplingParams(1.0, top_k=40),
        SamplingParams(0.7, top_p=0.9, top_k=64),
        SamplingParams(100.0, top_k=40),  # so flat that one token too few or too many shows
        SamplingParams(100.0, top_k=2000),
        SamplingParams(0.7, top_p=0.9),
        SamplingParams(1.3, top_p=0.999),
    ]
    for p in choices:
        for row in range(3):
            params = SamplingParams(p.temperature, p.top_p, p.top_k, seed=row)
            found = int(sample(logits, [params] * 3, np.full(3, 5))[0][row])
            running = np.cumsum(exact_wide(logits[row], params))
            u = uniform(row, 5)
            # The running sums are of single precision here and there: a draw on an edge may fall to either side.
            possible = {int(np.searchsorted(running, u + shift, side="right")) for shift in (-2e-6, 0.0, 2e-6)}
            assert found in possible, (p, row)


def exact_wide(logits: npt.NDArray[np.float32], p: SamplingParams) -> Floats:
    """As ``exact``, with sorting by numpy."""
    order = np.argsort(-logits.astype(np.float64), kind="stable")[: p.top_k or len(logits)]
    weights = np.exp((logits[order].astype(np.float64) - float(logits.max())) / p.temperature)
    if p.top_p < 1.0:
        kept = int(np.searchsorted(np.cumsum(weights), p.top_p * weights.sum())) + 1
        order, weights = order[:kept], weights[:kept]
    probabilities = np.zeros(len(logits))
    probabilities[order] = weights / weights.sum()
    return probabilities


@pytest.mark.parametrize("vocab", [12, 700, 32000, 140_000])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(0.9, 0.95, 50, seed=3), SamplingParams(1.0, seed=3)]
)
def test_a_wide_row_gives_the_same_bits_alone_and_among_any(vocab: int, params: SamplingParams) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 4, (9, vocab)).astype(np.float32)
    logits[::2] += rng.normal(0, 100, (5, 1)).astype(np.float32)
    ids, logprobs = sample(logits, [params] * 9, np.arange(9))
    for i in range(9):
        alone = sample(logits[i : i + 1], [params], np.array([i]))
        assert (alone[0][0], alone[1][0]) == (ids[i], logprobs[i])
        pair = sample(logits[[i, i - 1]], [params] * 2, np.array([i, 0]))
        assert (pair[0][0], pair[1][0]) == (ids[i], logprobs[i])


def test_log_probabilities_are_those_of_the_whole_softmax() -> None:
    log_probabilities_are_right(np.random.default_rng(1).normal(0, 5, (50, 100)).astype(np.float32))


@pytest.mark.parametrize("top", [-200.0, -35.0, 0.0, 60.0, 75.0, 1e4])
def test_log_probabilities_of_wide_rows_are_right_wherever_they_lie(top: float) -> None:
    logits = np.random.default_rng(1).normal(0, 4, (2, 262_144))
    log_probabilities_are_right((logits - logits.max() + top).astype(np.float32))


def log_probabilities_are_right(logits: npt.NDArray[np.float32]) -> None:
    n = len(logits)
    whole = logits.astype(np.float64)
    whole -= whole.max(axis=1, keepdims=True)
    whole -= np.log(np.exp(whole).sum(axis=1, keepdims=True))
    for params in (SamplingParams(), SamplingParams(3.0, top_k=40, seed=2)):
        ids, logprobs = sample(logits, [params] * n, np.arange(n))
        assert logprobs.dtype == np.float32
        np.testing.assert_allclose(logprobs, whole[np.arange(n), ids], atol=1e-4)


@pytest.mark.parametrize(
    ("row", "possible"),
    [
        ([-INF, -INF, 5.0, -INF], {2}),
        ([3e38, -3e38, 0.0, 1.0], {0}),
        ([1e-40, 0.0, -1e-40, 0.0], {0, 1, 2, 3}),
        ([-3e38, -3e38, -3e38, -3e38], {0, 1, 2, 3}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(1.0), SamplingParams(1e-3, 0.9, 2), SamplingParams(100.0, 0.5)], ids=str
)
def test_extreme_logits(row: list[float], possible: set[int], params: SamplingParams) -> None:
    logits = np.tile(np.array(row, np.float32), (40, 1))
    before = logits.copy()
    ids, logprobs = sample(logits, [params] * 40, np.arange(40))
    assert set(ids.tolist()) <= possible
    assert np.isfinite(logprobs).all()
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-38, 1e-31, 1.0, 1e6])
@pytest.mark.parametrize(
    "row",
    [
        [3e38, -3e38, 2.9e38, -INF],
        [3e38, 3e38, -INF, -INF],
        [-3e38, -3.2e38, -3.4e38, -INF],
        [1e-31, 0.0, -1e-31, 1e-38],
        [0.0, -1e-45, -3e-45, -INF],
        [5.0, 4.0, -3e38, 3e38],
    ],
    ids=str,
)
@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.9}], ids=str)
@pytest.mark.filterwarnings("error")
def test_what_extreme_rows_and_temperatures_leave_is_right(
    row: list[float], temperature: float, cut: dict[str, Any]
) -> None:
    """By the textbook, in double precision, where no difference overflows and no temperature vanishes."""
    logits = np.array(row, np.float32)
    params = SamplingParams(float(np.float32(temperature)), seed=0, **cut)
    rows = np.tile(logits, (60, 1))
    ids, logprobs = sample(rows, [params] * 60, np.arange(60))
    wide = logits.astype(np.float64)
    softmax = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    np.testing.assert_allclose(logprobs, softmax[ids], rtol=1e-6, atol=1e-6)
    if not temperature:
        assert set(ids.tolist()) == {int(wide.argmax())}
        return
    tokens, weights = candidates(logits, params)
    left = np.zeros(len(row))
    left[tokens] = weights / weights.sum()
    np.testing.assert_allclose(left, exact(wide.tolist(), params), atol=1e-6)
    assert set(ids.tolist()) <= set(np.flatnonzero(left).tolist())


UNUSABLE = [
    ([0.0, np.nan, 1.0], "NaN at index 1 of 3"),
    ([np.nan, np.nan, INF], "NaN at index 0 of 3 and 1 more"),
    ([0.0, 3e38, INF], "+inf at index 2 of 3"),
    ([-INF, INF, INF], "+inf at index 1 of 3 and 1 more"),
    ([-INF, -INF, -INF], "-inf at every index of 3"),
]


@pytest.mark.parametrize(("row", "fault"), UNUSABLE, ids=str)
@pytest.mark.parametrize("width", [3, 140_000])
@pytest.mark.filterwarnings("error")
def test_a_row_from_which_nothing_can_be_drawn_gives_no_token_and_its_neighbours_theirs(
    row: list[float], fault: str, width: int
) -> None:
    rows = np.full((4, width), -INF, np.float32)
    rows[:, :3] = [0.0, 2.0, 1.0]
    rows[2, :3] = row
    params = [SamplingParams(), SamplingParams(0.5, 0.9, 2, seed=3), SamplingParams(1.0, seed=4), SamplingParams()]
    for turned in (params, params[::-1]):
        ids, logprobs = sample(rows, turned, np.arange(4))
        assert ids[2] == NO_TOKEN
        assert np.isnan(logprobs[2])
        good = [0, 1, 3]
        alone = sample(rows[good], [turned[i] for i in good], np.array(good))
        assert (ids[good].tolist(), logprobs[good].tolist()) == (alone[0].tolist(), alone[1].tolist())
    assert fault_of(rows[2]) == fault.replace("of 3", f"of {width}")
    with pytest.raises(UnusableLogits, match=re.escape(fault_of(rows[2]))):
        candidates(rows[2], params[1])


@pytest.mark.filterwarnings("error")
def test_a_logit_beyond_float32_is_no_number_here_and_one_below_it_is_a_mask() -> None:
    rows = np.array([[0.0, 1e300], [-1e300, 0.0]])
    assert sample(rows, [SamplingParams()] * 2, np.arange(2))[0].tolist() == [NO_TOKEN, 1]
    assert fault_of(rows[0]) == "1e+300, which float32 cannot hold, at index 1 of 2"
    assert fault_of(rows[1]) == ""


def test_uniform_is_uniform_and_seeds_do_not_repeat_one_another() -> None:
    n = 200
    grid = np.array([[uniform(seed, position) for position in range(n)] for seed in range(n)])
    flat = np.sort(grid.ravel())
    assert flat[0] >= 0.0
    assert flat[-1] < 1.0
    # Kolmogorov and Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand.
    assert np.abs(flat - np.arange(n * n) / (n * n)).max() < 1.95 / n
    assert len(np.unique(flat)) == n * n, "two places share their chance: neighbouring seeds give shifted texts"
    for shift in (0, 1, 2):
        one, other = grid[:-1, : n - shift].ravel(), grid[1:, shift:].ravel()
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.03
        one, other = grid[:, : n - 1 - shift].ravel(), grid[:, 1 + shift :].ravel()
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.03


def test_the_draw_of_a_seed_and_position_stays() -> None:
    """A seed that someone has noted gives the same text with the next release."""
    assert [uniform(*place) for place in ((0, 0), (1, 0), (0, 1), (2**64 - 1, 2**31 - 1))] == [
        0.6524484863740322,
        0.36818951565166946,
        0.1663964394676608,
        0.5989102202930989,
    ]

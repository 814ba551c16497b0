"""Looking up what followed before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmsched.client.generation.drafting import PromptLookup
from shmsched.errors import InvalidRequest


def looked_up(tokens: list[int], max_ngram: int, n: int) -> list[int]:
    """The same, told plainly."""
    for size in range(max_ngram, 0, -1):
        places = [i + size for i in range(len(tokens) - size) if tokens[i : i + size] == tokens[-size:]]
        if size < len(tokens) and places:
            enough = [i for i in places if i + n <= len(tokens)]
            i = enough[-1] if enough else places[0]
            return tokens[i : i + n]
    return []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 6), st.integers(1, 9))
def test_what_followed_the_last_tokens_before(tokens: list[int], max_ngram: int, n_draft: int, n: int) -> None:
    draft = PromptLookup(max_ngram, n_draft).draft(np.array(tokens, np.int32), n)
    assert draft.tokens == looked_up(tokens, max_ngram, min(n, n_draft))
    assert draft.distributions is None


def test_the_longest_match_wins_and_the_latest_of_those() -> None:
    tokens = np.array([1, 2, 3, 9, 7, 2, 3, 8, 8, 1, 2, 3], np.int32)
    assert PromptLookup(3, 2).draft(tokens, 8).tokens == [9, 7]
    assert PromptLookup(2, 2).draft(tokens, 8).tokens == [8, 8]


def test_nothing_is_drafted_where_nothing_was_before() -> None:
    assert PromptLookup().draft(np.array([1, 2, 3], np.int32), 8).tokens == []
    assert PromptLookup().draft(np.array([1], np.int32), 8).tokens == []


@pytest.mark.parametrize("options", [(0, 1), (1, 0), (-1, 8)])
def test_numbers_below_one_are_refused(options: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match="both must be 1 or more"):
        PromptLookup(*options)

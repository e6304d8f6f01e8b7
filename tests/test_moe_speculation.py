"""Drafts from a request's own tokens, and what of them is accepted."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.speculation import MAX_CANDIDATES, NgramIndex, Speculation, verify


def longest_match(tokens, low, high, count):
    """The definition: the longest suffix with an earlier place, the latest place of that."""
    for length in range(min(high, len(tokens) - 1), low - 1, -1):
        suffix = tokens[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == suffix:
                longer = list(tokens)
                for i in range(count):
                    longer.append(longer[end + i])
                return longer[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 3), st.integers(0, 4))
def test_a_draft_follows_the_longest_and_latest_match(tokens, low, more):
    index = NgramIndex(Speculation(4, low, low + more), tokens)
    assert index.propose(4) == longest_match(tokens, low, low + more, 4)


@given(st.lists(st.integers(0, 2), max_size=30))
def test_an_index_that_grows_equals_one_that_is_built(tokens):
    growing = NgramIndex(Speculation(), tokens[:5])
    for token in tokens[5:]:
        growing.append(token)
    assert growing.propose(5) == NgramIndex(Speculation(), tokens).propose(5)


def test_a_period_goes_on():
    assert NgramIndex(Speculation(), [7, 8, 9] * 3).propose(5) == [7, 8, 9, 7, 8]
    assert NgramIndex(Speculation(), [5] * 4).propose(3) == [5, 5, 5]


def test_nothing_is_proposed_without_a_match_or_a_place():
    assert NgramIndex(Speculation(), range(10)).propose(4) == []
    assert NgramIndex(Speculation(), []).propose(4) == []
    assert NgramIndex(Speculation(), [7] * 5).propose(0) == []


def test_a_proposal_compares_few_places():
    """Each earlier place matches 2 tokens, so that no place is long enough to end the walk."""
    tokens = [token for i in range(20000) for token in (100 + i, 1, 2)]
    index = NgramIndex(Speculation(4, 2, 8), tokens)
    start = time.perf_counter()
    for _ in range(100):
        assert index.propose(4)[0] == 100 + 19999
    assert (time.perf_counter() - start) / 100 < MAX_CANDIDATES * 50e-6


def test_accepted_tokens_are_those_of_plain_decoding():
    assert verify([], [5]) == [5]
    assert verify([1, 2], [1, 2, 3]) == [1, 2, 3]
    assert verify([1, 2], [1, 9, 3]) == [1, 9]
    assert verify([1, 2], [9, 2, 3]) == [9]


@pytest.mark.parametrize("numbers", [(0, 1, 2), (1, 0, 2), (1, 3, 2)])
def test_numbers_that_make_no_sense_are_refused(numbers):
    with pytest.raises(InvalidArgument, match="min_match <= max_match"):
        Speculation(*numbers)

"""The statistics of a race: properties of intervals, ratios, ties and winners."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelcat.bench.states import BLOCKS
from kernelcat.bench.stats import (
    MARGIN,
    Interval,
    corrected_confidence,
    decide,
    leader,
    median_interval,
    quantiles,
    ratio_interval,
    ties,
)

times = st.floats(0.5, 1e6)
samples = st.lists(times, min_size=1, max_size=60)


@given(st.lists(times, min_size=1, max_size=200), st.integers(2, 40))
def test_quantiles_ascend_from_the_least_to_the_largest_sample(values, count) -> None:
    found = quantiles(values, count)
    assert found == sorted(found) and set(found) <= set(values)
    assert (found[0], found[-1]) == (min(values), max(values))
    assert len(found) == min(len(values), count)


def test_quantiles_of_many_samples_are_evenly_spaced() -> None:
    assert quantiles(list(range(101)), 5) == [0, 25, 50, 75, 100]


@given(samples, st.floats(0.5, 0.999))
def test_an_interval_contains_its_median_and_lies_within_the_samples(values, confidence) -> None:
    interval = median_interval(values, confidence)
    assert interval.median == median(values)
    assert min(values) <= interval.low <= interval.median <= interval.high <= max(values)


@given(samples, st.floats(0.5, 0.99), st.floats(0.0, 0.009))
def test_more_confidence_never_narrows_an_interval(values, confidence, more) -> None:
    narrow, wide = median_interval(values, confidence), median_interval(values, confidence + more)
    assert wide.low <= narrow.low and narrow.high <= wide.high


@given(samples, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(values, shuffle) -> None:
    shuffled = list(values)
    shuffle.shuffle(shuffled)
    assert median_interval(values) == median_interval(shuffled)


def test_the_interval_contains_the_true_median_as_often_as_its_confidence() -> None:
    rng = random.Random(7)
    for n in (6, 9, 15, 30):
        intervals = [median_interval([rng.gauss(0, 1) for _ in range(n)]) for _ in range(2000)]
        hits = sum(interval.low <= 0 <= interval.high for interval in intervals)
        assert hits / 2000 > 0.94, n


def test_the_interval_of_fifteen_blocks_is_that_of_the_sign_test() -> None:
    assert median_interval(list(range(1, 16))) == Interval(8, 4, 12)


def test_a_race_has_enough_blocks_for_fifty_comparisons() -> None:
    """The range of all blocks has at least the corrected confidence."""
    assert corrected_confidence(50) <= 1 - 2 / 2**BLOCKS
    assert median_interval(list(range(BLOCKS))) == Interval(5, 1, 9)


def test_the_interval_of_two_thousand_samples_is_narrow() -> None:
    interval = median_interval(range(1, 2002))
    assert 950 < interval.low < interval.median == 1001 < interval.high < 1050


def test_the_median_of_no_values_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        median_interval([])


@given(st.lists(st.tuples(times, times), min_size=1, max_size=40))
def test_a_ratio_and_its_inverse_agree(pairs) -> None:
    a, b = zip(*pairs, strict=True)
    ratio, inverse = ratio_interval(a, b), ratio_interval(b, a)
    assert math.isclose(ratio.median, 1 / inverse.median, rel_tol=1e-9)
    assert math.isclose(ratio.low, 1 / inverse.high, rel_tol=1e-9)


@given(st.lists(st.tuples(times, st.floats(0.1, 10)), min_size=6, max_size=40))
def test_drift_that_both_contestants_share_changes_no_ratio(pairs) -> None:
    base = [t for t, _ in pairs]
    drifted = [t * drift for t, drift in pairs]
    slower = [1.1 * t for t in drifted]
    ratio = ratio_interval(slower, drifted)
    assert math.isclose(ratio.low, 1.1, rel_tol=1e-9)
    assert ratio_interval(base, base) == Interval(1, 1, 1)


@given(st.integers(1, 50))
def test_more_comparisons_need_more_confidence(comparisons) -> None:
    assert corrected_confidence(comparisons) <= corrected_confidence(comparisons + 1) < 1
    assert corrected_confidence(1) == pytest.approx(0.95)


def _samples(rng: random.Random, mean: float, noise: float, drift: list[float]) -> list[float]:
    return [mean * d * (1 + rng.gauss(0, noise)) for d in drift]


def test_a_real_difference_is_found_under_much_larger_drift() -> None:
    rng = random.Random(1)
    drift = [1 + 0.3 * i / 15 for i in range(15)]
    samples = {"b": _samples(rng, 103, 0.002, drift), "a": _samples(rng, 100, 0.002, drift)}
    assert leader(samples) == "a"
    assert decide(samples, order=str).winner == "a"


def test_noise_is_a_tie_and_the_simplest_wins() -> None:
    rng = random.Random(2)
    drift = [1.0] * 15
    for _ in range(20):
        samples = {k: _samples(rng, 100, 0.02, drift) for k in "cab"}
        decision = decide(samples, order=str)
        assert decision.winner == "a"


def test_a_tie_is_never_won_with_a_median_far_above_the_fastest() -> None:
    noisy = [100.0 + 60 * (i % 3) for i in range(11)]
    samples = {"simple": [1.06 * t for t in reversed(noisy)], "tricky": noisy}
    decision = decide(samples, ["simple", "tricky"].index)
    assert (decision.winner, decision.tied) == ("tricky", ("simple", "tricky"))


def test_a_difference_under_one_percent_is_a_tie_even_without_noise() -> None:
    samples = {"simple": [100.9] * 15, "tricky": [100.0] * 15}
    order = ["simple", "tricky"].index
    assert decide(samples, order).winner == "simple"
    assert decide({**samples, "simple": [101.1] * 15}, order).winner == "tricky"


@pytest.mark.parametrize(("gain", "winner"), [(0.015, "old"), (0.025, "new")])
def test_a_challenger_must_beat_the_incumbent_by_two_percent(gain, winner) -> None:
    samples = {"old": [100.0 * (1 + gain)] * 15, "new": [100.0] * 15}
    assert decide(samples, str, incumbent="old").winner == winner
    assert (gain > MARGIN) == (winner == "new")


def test_an_incumbent_that_is_not_in_the_race_changes_nothing() -> None:
    samples = {"a": [100.0] * 15, "b": [150.0] * 15}
    assert decide(samples, str, incumbent="gone") == decide(samples, str)


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(times, min_size=8, max_size=8),
                       min_size=1), st.sampled_from("abcdef"))  # fmt: skip
def test_a_decision_is_deterministic_and_confirms_its_winner(samples, incumbent) -> None:
    decision = decide(samples, str, incumbent)
    assert decision.winner in samples
    assert decide(dict(reversed(samples.items())), str, incumbent) == decision
    assert decide(samples, str, decision.winner).winner == decision.winner


def test_a_tie_is_a_difference_within_noise_or_under_one_percent() -> None:
    assert ties(Interval(1.05, 0.99, 1.1))
    assert ties(Interval(1.009, 1.008, 1.010))
    assert not ties(Interval(1.05, 1.02, 1.08))

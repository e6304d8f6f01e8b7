"""`sample`: draws have the right distribution, and depend on nothing but their own row."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kernelcat import catalog, dtypes
from kernelcat.errors import InvalidArgument
from kernelcat.verify import gate

ENTRY = catalog.entry("sample")
LOGITS = np.array([2.0, 1.0, 1.0, -np.inf, 0.0, -1.0, 0.5, -3.0], np.float32)


def problem_of(rows: int, vocab: int, **flags: bool):
    return ENTRY.problem(rows=rows, vocab=vocab, dtype="float32", **flags)


def draws(rows: int, logits=LOGITS, **values):
    """Ids of ``rows`` equal rows of logits, with one seed and the offsets 0, 1, 2, ..."""
    parameters = {
        "temperature": 1.0, "seed": 7, "min_p": 0.0, "top_k": 0, "top_p": 1.0, **values
    }  # fmt: skip
    types = {t.name: t.dtype for t in ENTRY.inputs}
    arrays = {name: np.full(rows, value, types[name]) for name, value in parameters.items()}
    arrays |= {"logits": np.tile(logits, (rows, 1)), "offset": np.arange(rows)}
    problem = problem_of(rows, len(logits), has_temperature=True, has_filters=True)
    return ENTRY.oracle(problem, arrays)["ids"]


def chi_square(ids, probabilities) -> float:
    counts = np.bincount(ids, minlength=len(probabilities))
    expected = len(ids) * probabilities
    assert (counts[expected == 0] == 0).all()
    is_possible = expected > 0
    return float((((counts - expected) ** 2)[is_possible] / expected[is_possible]).sum())


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def test_tokens_are_drawn_with_their_probabilities() -> None:
    """The limits are exceeded by chance once in 1000 seeds; the seed is fixed."""
    x = LOGITS.astype("float64")
    assert chi_square(draws(5000), softmax(x)) < 22.5  # 6 degrees of freedom
    assert chi_square(draws(5000, temperature=0.5), softmax(x / 0.5)) < 22.5
    first_three = np.where(np.arange(8) < 3, x, -np.inf)
    assert chi_square(draws(5000, top_k=3), softmax(first_three)) < 13.8  # 2 degrees


def test_filters_leave_prefixes_of_the_order() -> None:
    probabilities = softmax(LOGITS.astype("float64"))
    assert set(draws(500, top_k=2)) == {0, 1}  # of two equal logits the lower id
    assert set(draws(500, top_p=0.5)) == {0, 1}
    assert set(draws(500, top_p=float(probabilities[:2].sum()) + 0.01)) == {0, 1, 2}
    assert set(draws(500, min_p=0.3)) == {0, 1, 2}
    # top_p counts the weight that top_k leaves: 0.69 of two tokens is less than the first of them.
    assert set(draws(500, top_k=2, top_p=0.69)) == {0}
    assert set(draws(500, top_k=2, top_p=0.75)) == {0, 1}


def test_a_tiny_top_p_and_one_token_leave_the_largest_logit() -> None:
    assert set(draws(200, top_p=1e-6)) == {0}
    assert set(draws(200, top_k=1)) == {0}
    assert set(draws(200, temperature=0.0)) == {0}
    one = np.full(8, -np.inf, np.float32)
    one[5] = -4.0
    assert set(draws(200, logits=one, top_p=0.3, min_p=0.5)) == {5}


def test_another_seed_draws_other_tokens() -> None:
    assert 0.2 < (draws(1000) == draws(1000, seed=8)).mean() < 0.4  # by chance 0.29
    assert np.array_equal(draws(1000), draws(1000))


def test_a_row_does_not_depend_on_its_batch() -> None:
    flags = dict.fromkeys(("has_temperature", "has_filters", "has_penalty", "has_logprobs"), True)
    drawn = gate.drawn(ENTRY, problem_of(24, 300, **flags), np)
    whole = ENTRY.oracle(problem_of(24, 300, **flags), drawn)
    order = np.random.default_rng(0).permutation(24)[:10]
    part = ENTRY.oracle(problem_of(10, 300, **flags), {n: a[order] for n, a in drawn.items()})
    for name in ("ids", "logprobs"):
        assert np.array_equal(whole[name][order], part[name])


def test_greedy_is_the_first_of_the_largest() -> None:
    problem = problem_of(40, 50)
    logits = gate.drawn(ENTRY, problem, np)["logits"]
    assert np.array_equal(ENTRY.oracle(problem, {"logits": logits})["ids"], logits.argmax(1))
    assert any((row == row.max()).sum() > 1 for row in logits)  # there are ties


def test_masked_tokens_are_never_chosen() -> None:
    problem = problem_of(200, 30, has_temperature=True)
    drawn = gate.drawn(ENTRY, problem, np)
    ids = ENTRY.oracle(problem, drawn)["ids"]
    assert np.isfinite(drawn["logits"][np.arange(200), ids]).all()


def test_a_penalty_moves_seen_tokens_towards_the_end() -> None:
    problem = problem_of(1, 33, has_penalty=True)
    logits = np.zeros((1, 33), np.float32)
    logits[0, 32], logits[0, 3] = 2.0, 1.5
    arrays = {"logits": logits, "penalty": np.array([1.5], np.float32)}
    for word, expected in ((0, 32), (1, 3)):  # 2 and 1.5; 2 / 1.5 and 1.5
        seen = np.array([[0, word]], np.int32)
        assert ENTRY.oracle(problem, arrays | {"seen": seen})["ids"][0] == expected
    logits[0, :] = -1.0
    seen = np.array([[0b1101, 0]], np.int32)
    assert ENTRY.oracle(problem, arrays | {"seen": seen})["ids"][0] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocab", [7, 3000])
def test_drawn_rows_use_draws_and_filters(vocab: int, dtype: str) -> None:
    """Rows with unclear decisions are made simpler, but most rows stay as they are."""
    flags = {"has_temperature": True, "has_filters": True}
    problem = ENTRY.problem(rows=120, vocab=vocab, dtype=dtype, **flags)
    drawn = gate.drawn(ENTRY, problem, np)
    assert (drawn["temperature"] > 0).mean() > 0.7
    assert (drawn["top_p"] < 1).mean() > 0.6
    assert (drawn["min_p"] > 0).mean() > 0.3
    assert drawn["temperature"][0] > 0
    assert drawn["top_p"][0] < 1


def test_ids_stay_when_weights_are_off_by_rounding() -> None:
    """Temperatures that are off by 2^-20 change no drawn decision."""
    flags = {"has_temperature": True, "has_filters": True}
    problem = ENTRY.problem(rows=60, vocab=2000, dtype="bfloat16", **flags)
    host = SimpleNamespace(xp=np)
    prepared = gate.prepare(ENTRY, problem, host)
    values = {
        t.name: dtypes.decode(prepared.arrays[t.name], t.dtype_of(problem))
        for t in ENTRY.inputs
        if t.present(problem)
    }
    for factor in (1 - 2.0**-20, 1 + 2.0**-20):
        moved = values | {"temperature": values["temperature"] * np.float32(factor)}
        assert np.array_equal(ENTRY.oracle(problem, moved)["ids"], prepared.expected["ids"])


def test_filters_need_a_draw() -> None:
    with pytest.raises(InvalidArgument, match="has_filters needs has_temperature"):
        problem_of(1, 5, has_filters=True)

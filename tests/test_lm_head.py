"""`lm_head`: drawn logits are exact and have ties; what a call may ask for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kernelcat import catalog
from kernelcat.errors import InvalidArgument
from kernelcat.verify import gate

ENTRY = catalog.entry("lm_head")
HOST = SimpleNamespace(xp=np)


def problem_of(**axes):
    common = {"tokens": 20, "vocab": 800, "hidden": 512, "top_k": 16, "dtype": "bfloat16"}
    return ENTRY.problem(**{**common, **axes})


def test_drawn_logits_are_exact_in_float32() -> None:
    """At the largest hidden size of the named problems any order of summation is exact."""
    hidden = max(problem["hidden"] for problem in ENTRY.problems.values())
    drawn = gate.drawn(ENTRY, problem_of(tokens=4, vocab=64, hidden=hidden), np)
    x, w = drawn["x"], drawn["w"]
    logits = x @ w.T
    assert np.array_equal(logits, x.astype("float64") @ w.T.astype("float64"))
    assert np.array_equal(logits, x[:, ::-1] @ w[:, ::-1].T)
    steps = np.abs(x).max() * np.abs(w).max() * hidden / 2.0**-8  # of 2^-8, the least product
    assert steps < 2**24


def test_drawn_logits_have_ties_among_the_first_tokens() -> None:
    values = gate.prepare(ENTRY, problem_of(), HOST).expected["values"]
    assert (np.diff(values, axis=1) <= 0).all()
    is_tied = (np.diff(values, axis=1) == 0).any(1)
    assert is_tied.mean() > 0.2


def test_one_token_is_the_argmax() -> None:
    problem = problem_of(top_k=1, has_logits=True)
    expected = gate.prepare(ENTRY, problem, HOST).expected
    assert np.array_equal(expected["ids"][:, 0], expected["logits"].argmax(1))


def test_rounded_logits_do_not_decide() -> None:
    """Tokens are found by float32 logits, also where logits are stored in 16 bits."""
    problem = problem_of(has_logits=True, logits_dtype="bfloat16")
    rounded = gate.prepare(ENTRY, problem, HOST).expected
    whole = gate.prepare(ENTRY, problem_of(has_logits=True), HOST).expected
    assert np.array_equal(rounded["ids"], whole["ids"])


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"top_k": 17}, "top_k=17 must be at most"),
        ({"vocab": 8}, "at most vocab=8"),
        ({"logits_dtype": "bfloat16"}, "needs has_logits"),
        ({"has_logits": True, "logits_dtype": "float16"}, "must be float32 or dtype"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(axes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        problem_of(**axes)

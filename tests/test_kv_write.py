"""`kv_write`: drawn inputs have a slot for each new token and NaN where nothing may be read."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcat import catalog
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument
from kernelcat.reference._new_tokens import lengths
from kernelcat.reference._rope import STYLES
from kernelcat.reference._sequences import GARBAGE
from kernelcat.reference.kv_write import FP8, appended
from kernelcat.verify import fuzz, gate

ENTRY = catalog.entry("kv_write")


def inputs(problem: Problem, seed: int = 0) -> dict[str, np.ndarray]:
    return gate.drawn(ENTRY, problem, np, seed)


@settings(max_examples=60, deadline=None)
@given(problem=fuzz.problems(ENTRY), seed=st.integers(0, 3))
def test_each_new_token_has_a_slot_and_all_that_is_not_read_is_poison(
    problem: Problem, seed: int
) -> None:
    drawn, size = inputs(problem, seed), problem["page_size"]
    q_lens = [after - before for before, after in pairwise(drawn["cu_q"].tolist())]
    table = np.full_like(drawn["block_table"], GARBAGE)
    is_new = np.zeros(drawn["k_cache"].shape[:2], bool)
    used_positions = np.zeros(problem["positions"], bool)
    for s, (q_len, kv_len) in enumerate(zip(q_lens, drawn["kv_lens"].tolist(), strict=True)):
        for at in range(kv_len - q_len, kv_len):
            page = table[s, at // size] = drawn["block_table"][s, at // size]
            assert not is_new[page, at % size]
            is_new[page, at % size] = True
            if problem["rotary_dim"]:
                used_positions[at] = True
    assert is_new.sum() == problem["tokens"]
    assert np.array_equal(table, drawn["block_table"])
    used_pages = [page for page in table.flat if page != GARBAGE]
    assert len(used_pages) == len(set(used_pages))
    for name in ("k_cache", "v_cache"):
        assert (np.isnan(drawn[name]).all((2, 3)) == is_new).all()
        assert (np.isnan(drawn[name]).any((2, 3)) == is_new).all()
    if problem["rotary_dim"]:
        assert (np.isnan(drawn["cos_sin"]).any(1) == ~used_positions).all()


def test_ragged_batches_have_empty_sequences_and_new_tokens_in_two_pages() -> None:
    kinds = set()
    for pages in range(40, 60):
        axes = {**appended(6, 4, 2, 64, context=96, page_size=32, lengths="ragged").values}
        problem = ENTRY.problem(**{**axes, "tokens": 12, "pages": pages})
        for q_len, kv_len in zip(*lengths(problem), strict=True):
            if not q_len:
                kinds.add("no new token" if kv_len else "empty")
            elif (kv_len - q_len) // 32 < (kv_len - 1) // 32:
                kinds.add("two pages")
    assert kinds == {"empty", "no new token", "two pages"}


def test_sequences_are_filled_one_after_another_where_pages_are_scarce() -> None:
    axes = appended(4, 1, 1, 64, context=32, page_size=16).values
    scarce = ENTRY.problem(**{**axes, "tokens": 40, "pages": 3, "lengths": "ragged"})
    assert lengths(scarce) == ((32, 8, 0, 0), (32, 8, 0, 0))
    cut_short = ENTRY.problem(**{**axes, "tokens": 72, "pages": 7, "positions": 20})
    assert lengths(cut_short) == ((20, 20, 16, 16), (20, 20, 16, 16))


def test_scales_make_some_values_too_large_for_float8() -> None:
    problem = appended(16, 4, 2, 64, kv_dtype=FP8, has_scales=True)
    is_new = np.isnan(inputs(problem)["k_cache"])
    k_cache = np.abs(ENTRY.oracle(problem, inputs(problem))["k_cache"])
    assert k_cache[~is_new].max() < 10
    assert 0.001 < (k_cache[is_new] == 448).mean() < 0.5


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_scores_of_rotated_tokens_depend_on_their_distance_alone(
    style: str, rotary_dim: int
) -> None:
    """All queries are equal before RoPE, and so are all keys."""
    problem = appended(1, 1, 1, 64, context=40, q_len=40, style=style, rotary_dim=rotary_dim)
    drawn = inputs(problem)
    drawn["q"][:], drawn["k"][:] = drawn["q"][:1], drawn["k"][:1]
    angles = np.outer(np.arange(40), 100.0 ** -np.linspace(0, 1, rotary_dim // 2))
    drawn["cos_sin"] = np.hstack((np.cos(angles), np.sin(angles))).astype("float32")
    out = ENTRY.oracle(problem, drawn)
    keys = out["k_cache"][drawn["block_table"][0]].reshape(-1, 64)[:40]
    scores = out["q_out"][:, 0] @ keys.T
    for distance in range(-20, 20):
        diagonal = np.diagonal(scores, distance)
        assert np.allclose(diagonal, diagonal[0], atol=1e-3)
    assert np.std(scores[0]) > 0.1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rotary_dim": 33}, "rotary_dim=33 must be even, and at most head_dim"),
        ({"rotary_dim": 128}, "rotary_dim=128 must be even, and at most head_dim"),
        ({"kv_dtype": "float16"}, "kv_dtype is dtype"),
        ({"tokens": 257}, "more new tokens than the table, or cos_sin, has room for"),
        ({"positions": 0}, "more new tokens than the table, or cos_sin, has room for"),
        ({"tokens": 40, "pages": 2}, "40 new tokens do not fit in 2 pages"),
        ({"style": "gptj"}, "use one of: neox, interleaved"),
    ],
)
def test_an_invalid_problem_is_refused_in_one_line(changes: dict, reason: str) -> None:
    valid = appended(4, 8, 2, 64, context=64).values
    with pytest.raises(InvalidArgument, match=reason):
        ENTRY.problem(**{**valid, **changes})


def test_heads_need_not_be_a_multiple_of_kv_heads_and_may_be_0() -> None:
    for heads in (0, 5):
        problem = ENTRY.problem(**{**appended(2, 8, 3, 64).values, "heads": heads})
        assert ENTRY.oracle(problem, inputs(problem))["q_out"].shape == (2, heads, 64)

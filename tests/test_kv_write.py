"""What the inputs of `kv_write` promise: places for all new tokens, poison everywhere else."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcat import catalog
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument
from kernelcat.reference import kv_write
from kernelcat.reference.kv_write import FP8, appended
from kernelcat.reference.paged_attn import GARBAGE
from kernelcat.verify import fuzz, gate

ENTRY = catalog.entry("kv_write")


def inputs(problem: Problem, seed: int = 0) -> dict[str, np.ndarray]:
    return gate.drawn(ENTRY, problem, np, seed)


@settings(max_examples=60, deadline=None)
@given(problem=fuzz.problems(ENTRY), seed=st.integers(0, 3))
def test_new_tokens_have_a_place_each_and_everything_else_is_poison(
    problem: Problem, seed: int
) -> None:
    drawn, size = inputs(problem, seed), problem["page_size"]
    q_lens = [after - before for before, after in pairwise(drawn["cu_q"].tolist())]
    table = np.full_like(drawn["block_table"], GARBAGE)
    new = np.zeros(drawn["k_cache"].shape[:2], bool)
    turning = np.zeros(problem["positions"], bool)
    for s, (q_len, kv_len) in enumerate(zip(q_lens, drawn["kv_lens"].tolist(), strict=True)):
        for at in range(kv_len - q_len, kv_len):
            page = table[s, at // size] = drawn["block_table"][s, at // size]
            assert not new[page, at % size]
            new[page, at % size] = True
            if problem["rotary_dim"]:
                turning[at] = True
    assert new.sum() == problem["tokens"]
    assert np.array_equal(table, drawn["block_table"])
    used = [page for page in table.flat if page != GARBAGE]
    assert len(used) == len(set(used))
    for name in ("k_cache", "v_cache"):
        assert (np.isnan(drawn[name]).all((2, 3)) == new).all()
        assert (np.isnan(drawn[name]).any((2, 3)) == new).all()
    if problem["rotary_dim"]:
        assert (np.isnan(drawn["cos_sin"]).any(1) == ~turning).all()


def test_ragged_batches_have_empty_sequences_and_cross_pages() -> None:
    seen = set()
    for pages in range(40, 60):
        axes = {**appended(6, 4, 2, 64, context=96, page_size=32, lengths="ragged").values}
        problem = ENTRY.problem(**{**axes, "tokens": 12, "pages": pages})
        for q_len, kv_len in zip(*kv_write.lengths(problem), strict=True):
            if not q_len:
                seen.add("none new" if kv_len else "empty")
            elif (kv_len - q_len) // 32 < (kv_len - 1) // 32:
                seen.add("two pages")
    assert seen == {"empty", "none new", "two pages"}


def test_few_pages_are_filled_one_sequence_after_another() -> None:
    axes = appended(4, 1, 1, 64, context=32, page_size=16).values
    tight = ENTRY.problem(**{**axes, "tokens": 40, "pages": 3, "lengths": "ragged"})
    assert kv_write.lengths(tight) == ((32, 8, 0, 0), (32, 8, 0, 0))
    cut = ENTRY.problem(**{**axes, "tokens": 72, "pages": 7, "positions": 20})
    assert kv_write.lengths(cut) == ((20, 20, 16, 16), (20, 20, 16, 16))


def test_scales_make_some_values_too_large_for_float8() -> None:
    problem = appended(16, 4, 2, 64, kv_dtype=FP8, has_scales=True)
    written = ENTRY.oracle(problem, inputs(problem))["k_cache"]
    bounded = np.abs(written[~np.isnan(inputs(problem)["k_cache"])])
    stored = np.abs(written[np.isnan(inputs(problem)["k_cache"])])
    assert bounded.max() < 10
    assert 0.001 < (stored == 448).mean() < 0.5


@pytest.mark.parametrize("style", kv_write.STYLES)
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_products_depend_on_distances_alone(style: str, rotary_dim: int) -> None:
    """Of a query and a key, both turned by the angles of their positions."""
    problem = appended(1, 1, 1, 64, context=40, q_len=40, style=style, rotary_dim=rotary_dim)
    drawn = inputs(problem)
    drawn["q"][:], drawn["k"][:] = drawn["q"][:1], drawn["k"][:1]
    angles = np.outer(np.arange(40), 100.0 ** -np.linspace(0, 1, rotary_dim // 2))
    drawn["cos_sin"] = np.hstack((np.cos(angles), np.sin(angles))).astype("float32")
    out = ENTRY.oracle(problem, drawn)
    keys = out["k_cache"][drawn["block_table"][0]].reshape(-1, 64)[:40]
    scores = out["q_out"][:, 0] @ keys.T
    for distance in range(-20, 20):
        along = np.diagonal(scores, distance)
        assert np.allclose(along, along[0], atol=1e-3)
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
def test_what_makes_no_sense_is_refused_in_one_line(changes: dict, reason: str) -> None:
    sound = appended(4, 8, 2, 64, context=64).values
    with pytest.raises(InvalidArgument, match=reason):
        ENTRY.problem(**{**sound, **changes})


def test_heads_need_not_be_multiples_and_queries_may_be_none() -> None:
    for heads in (0, 5):
        problem = ENTRY.problem(**{**appended(2, 8, 3, 64).values, "heads": heads})
        assert ENTRY.oracle(problem, inputs(problem))["q_out"].shape == (2, heads, 64)

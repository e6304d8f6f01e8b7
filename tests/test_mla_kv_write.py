"""`mla_kv_write`: drawn inputs have a slot for each new token and poison where nothing is read."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcat import catalog
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument
from kernelcat.reference import _mla_row
from kernelcat.reference._rope import STYLES
from kernelcat.reference._sequences import GARBAGE
from kernelcat.reference.flashmla import PACKED_TYPE, POISON, latent
from kernelcat.reference.mla_kv_write import appended
from kernelcat.verify import fuzz, gate

ENTRY = catalog.entry("mla_kv_write")


def inputs(problem: Problem, seed: int = 0) -> dict[str, np.ndarray]:
    return gate.drawn(ENTRY, problem, np, seed)


@settings(max_examples=60, deadline=None)
@given(problem=fuzz.problems(ENTRY), seed=st.integers(0, 3))
def test_each_new_token_has_a_slot_and_all_that_is_not_read_is_poison(
    problem: Problem, seed: int
) -> None:
    drawn, size = inputs(problem, seed), problem["page_size"]
    q_lens = [after - before for before, after in pairwise(drawn["cu_q"].tolist())]
    table, cache = np.full_like(drawn["block_table"], GARBAGE), drawn["kv_cache"]
    is_new = np.zeros(cache.shape[:2], bool)
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
    if problem["kv_dtype"] == PACKED_TYPE:
        assert ((cache == POISON).all(2) == is_new).all()
        cache = _mla_row.unpack(cache.astype("uint8"))
    assert (np.isnan(cache).all(2) == is_new).all() and (np.isnan(cache).any(2) == is_new).all()
    if problem["rotary_dim"]:
        assert (np.isnan(drawn["cos_sin"]).any(1) == ~used_positions).all()


def test_some_drawn_latents_have_the_smallest_scale_and_some_a_large_one() -> None:
    problem = appended(128, kv_dtype=PACKED_TYPE)
    scales = _mla_row.scales(inputs(problem)["c"])
    assert scales.min() == 2.0**-13 and 0 < (scales == 2.0**-13).mean() < 0.5
    assert scales.max() > 1


@pytest.mark.parametrize("style", STYLES)
def test_products_of_rotated_keys_depend_on_their_distance_alone(style: str) -> None:
    """All keys are equal before RoPE."""
    problem = appended(1, context=40, q_len=40, style=style)
    drawn = inputs(problem)
    drawn["k_pe"][:] = drawn["k_pe"][:1]
    angles = np.outer(np.arange(40), 100.0 ** -np.linspace(0, 1, 32))
    drawn["cos_sin"] = np.hstack((np.cos(angles), np.sin(angles))).astype("float32")
    kv_cache = ENTRY.oracle(problem, drawn)["kv_cache"]
    rotated = kv_cache[drawn["block_table"][0]].reshape(-1, 576)[:40, 512:]
    scores = rotated @ rotated.T
    for distance in range(-20, 20):
        diagonal = np.diagonal(scores, distance)
        assert np.allclose(diagonal, diagonal[0], atol=1e-3)
    assert np.std(scores[0]) > 0.1


@pytest.mark.parametrize("kv_dtype", ["bfloat16", PACKED_TYPE])
def test_flashmla_reads_the_rows_that_are_written(kv_dtype: str) -> None:
    """Attention to a single token is the token's value, whatever the query is."""
    drawn = inputs(problem := appended(2, context=1, kv_dtype=kv_dtype))
    kv_cache = ENTRY.oracle(problem, drawn)["kv_cache"].astype("float32")
    reader = latent(2, 1, 16, 1, kv_dtype=kv_dtype)
    arrays = {
        "q": np.ones((2, 16, 576), "float32"), "kv_cache": kv_cache,
        **{name: drawn[name] for name in ("block_table", "kv_lens", "cu_q")},
    }  # fmt: skip
    out = catalog.entry("flashmla").oracle(reader, arrays)["out"]
    allowed = 1e-5 if kv_dtype == "bfloat16" else 1 / 16
    assert np.allclose(out, drawn["c"][:, None], rtol=allowed, atol=2.0**-23)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rotary_dim": 32}, "rotary_dim=32 is not supported; use one of: 0, 64"),
        ({"kv_dtype": "float16"}, r"kv_dtype is dtype \(bfloat16\) or uint8"),
        ({"dtype": "float16", "kv_dtype": "uint8"}, "rows of 656 bytes hold bfloat16"),
        ({"tokens": 257}, "more new tokens than the table, or cos_sin, has room for"),
        ({"positions": 0}, "more new tokens than the table, or cos_sin, has room for"),
        ({"tokens": 129, "pages": 2}, "129 new tokens do not fit in 2 pages"),
        ({"style": "gptj"}, "use one of: neox, interleaved"),
    ],
)
def test_an_invalid_problem_is_refused_in_one_line(changes: dict, reason: str) -> None:
    valid = appended(4, context=64).values
    with pytest.raises(InvalidArgument, match=reason):
        ENTRY.problem(**{**valid, **changes})


def test_the_least_work_is_rows_in_and_out() -> None:
    plain, packed = appended(3), appended(3, kv_dtype=PACKED_TYPE)
    for problem, row in ((plain, 1152), (packed, 656)):
        assert ENTRY.flops(problem) == 3 * 32 * 6
        assert ENTRY.bytes_moved(problem) == 3 * (1152 + row) + 64 * 4  # one position
    without_rope = appended(3, rotary_dim=0)
    assert ENTRY.flops(without_rope) == 0
    assert ENTRY.bytes_moved(without_rope) == 3 * 2 * 1152

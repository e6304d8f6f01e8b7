"""`paged_attn`: lengths of the inputs, poison in invisible slots, and the work that is counted."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcat import catalog, dtypes
from kernelcat.catalog.implementation import LANGUAGES
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument
from kernelcat.reference import paged_attn
from kernelcat.reference._sequences import GARBAGE
from kernelcat.report import show
from kernelcat.runtime import gpu
from kernelcat.verify import fuzz, gate

ENTRY = catalog.entry("paged_attn")
HOST = SimpleNamespace(xp=np, gpu=gpu.find("h200"))


def inputs(problem: Problem, seed: int = 0) -> dict[str, np.ndarray]:
    return gate.drawn(ENTRY, problem, np, seed)


@settings(max_examples=60, deadline=None)
@given(problem=fuzz.problems(ENTRY), seed=st.integers(0, 3))
def test_visible_tokens_are_numbers_and_all_other_slots_are_poison(
    problem: Problem, seed: int
) -> None:
    drawn = inputs(problem, seed)
    q_lens = [after - before for before, after in pairwise(drawn["cu_q"].tolist())]
    kv_lens, table = drawn["kv_lens"].tolist(), drawn["block_table"]
    assert (tuple(q_lens), tuple(kv_lens)) == paged_attn.lengths(problem)
    assert drawn["cu_q"][-1] == problem["tokens"] and max(q_lens, default=0) <= problem["max_q"]
    size, readable = problem["page_size"], np.zeros(drawn["k_cache"].shape[:2], bool)
    for s, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        assert q_len <= kv_len <= problem["table_width"] * size
        for token in range(kv_len):
            readable[table[s, token // size], token % size] = True
        assert (table[s, -(-kv_len // size) :] == GARBAGE).all()
    poisoned = "block_scale" if problem["kv_dtype"] == paged_attn.NVFP4 else "cache"
    for name in ("k", "v"):
        assert (np.isnan(drawn[f"{name}_{poisoned}"]).all((2, 3)) == ~readable).all()
        assert not np.isnan(drawn[f"{name}_{poisoned}"][readable]).any()


def test_ragged_batches_have_empty_sequences_and_whole_pages() -> None:
    ragged = paged_attn.attention(6, 4, 2, 64, 96, 32, lengths="ragged").values
    lengths = [
        paged_attn.lengths(ENTRY.problem(**{**ragged, "max_q": 3, "window": window}))
        for window in range(50)
    ]
    kv_lens = {length for _, batch in lengths for length in batch}
    assert {0, 1, 31, 32, 33, 64, 96} <= kv_lens
    assert {count for q_lens, _ in lengths for count in q_lens} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"heads": 5}, "must be a multiple of kv_heads"),
        ({"kv_dtype": "float16"}, "kv_dtype is dtype"),
        ({"kv_dtype": "uint8"}, "use one of: .*, float4_e2m1fn_x2"),
        ({"max_q": 1, "tokens": 9}, r"more query tokens than batch \* max_q"),
        ({"heads": 0}, "needs a query head"),
        ({"softcap": -1.0}, "must not be negative"),
        ({"softcap": float("nan")}, "softcap=nan must be a finite number"),
        ({"sm_scale": True}, "sm_scale=True must be a finite number"),
        ({"page_size": 8}, "use one of: 1, 16, 32, 64, 128"),
    ],
)
def test_inconsistent_problems_are_refused_with_a_reason(changes: dict, reason: str) -> None:
    axes = paged_attn.attention(4, 8, 2, 64, 64, 16).values
    with pytest.raises(InvalidArgument, match=reason):
        ENTRY.problem(**{**axes, **changes})


@settings(max_examples=200, deadline=None)
@given(problem=fuzz.problems(ENTRY))
def test_the_number_of_visible_pairs_equals_a_count_by_loops(problem: Problem) -> None:
    pairs = 0
    for q_len, kv_len in zip(*paged_attn.lengths(problem), strict=True):
        for visible in range(kv_len - q_len + 1, kv_len + 1):
            pairs += min(visible, problem["window"]) if problem["window"] else visible
    assert paged_attn.pairs_seen(problem) == pairs


def test_flops_and_bytes_count_the_visible_tokens_only() -> None:
    whole = paged_attn.attention(2, 8, 2, 64, 64, 16)
    assert ENTRY.flops(whole) == 4 * 2 * 64 * 8 * 64
    assert paged_attn.tokens_read(whole) == 2 * 64
    window = paged_attn.attention(2, 8, 2, 64, 64, 16, window=10)
    assert paged_attn.tokens_read(window) == 2 * 10
    causal = paged_attn.attention(1, 8, 2, 64, 64, 16, q_len=64)
    assert ENTRY.flops(causal) == 4 * 8 * 64 * (64 * 65 // 2)
    cached = 2 * 2 * 64 * 2 * 64 * 2
    assert ENTRY.bytes_moved(whole) == cached + 2 * 8 * (2 * 64 * 2 + 4)
    quantized = paged_attn.attention(2, 8, 2, 64, 64, 16, kv_dtype=paged_attn.NVFP4)
    in_blocks = 2 * 2 * 64 * 2 * (64 // 2 + 64 // 16)
    assert ENTRY.bytes_moved(quantized) == in_blocks + 2 * 8 * (2 * 64 * 2 + 4)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_query_without_visible_tokens_gets_zeros(has_sinks: bool) -> None:
    problem = paged_attn.attention(2, 8, 2, 64, 64, 16, has_sinks=has_sinks)
    arrays = inputs(problem) | {"kv_lens": np.array([0, 64], "int32")}
    results = ENTRY.oracle(problem, arrays)
    assert (results["out"][0] == 0).all() and (results["out"][1] != 0).all()
    assert np.allclose(results["lse"][0], arrays["sinks"] if has_sinks else -np.inf)


def test_a_quantized_cache_uses_the_whole_range_of_its_codes() -> None:
    problem = paged_attn.attention(2, 8, 2, 64, 64, 16, kv_dtype=paged_attn.NVFP4)
    drawn, prepared = inputs(problem), gate.prepare(ENTRY, problem, HOST)
    for name in ("k", "v"):
        scaled = drawn[f"{name}_cache"]
        assert abs(scaled).max() < 6.5 and abs(scaled.reshape(-1, 16)).max(1).min() > 5.5
        packed = prepared.arrays[f"{name}_cache"]
        assert packed.shape == (8, 16, 2, 32)
        assert abs(dtypes.decode(packed, paged_attn.NVFP4) - scaled.clip(-6, 6)).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [paged_attn.FP8, paged_attn.NVFP4])
@pytest.mark.parametrize("language", LANGUAGES)
def test_kernels_of_quantized_caches_prove_their_techniques(language: str, kv_dtype: str) -> None:
    target = gpu.find("h200")
    problem = paged_attn.attention(8, 32, 8, 128, 4096, 64, kv_dtype=kv_dtype, has_scales=True)
    serving = [
        implementation
        for implementation in catalog.in_language("paged_attn", language)
        if implementation.why_not(implementation.default(problem, target), problem, target) is None
    ]
    assert serving
    for report in show.machine_codes(serving, target, problem):
        assert all(report["techniques"].values()), report["implementation"]
        assert all(step["spill_bytes"] == 0 for step in report["steps"]), report["implementation"]

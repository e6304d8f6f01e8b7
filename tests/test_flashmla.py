"""`flashmla`: the arrays that its inputs hold, and the format of packed rows of 656 bytes."""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcat import catalog, dtypes
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument
from kernelcat.reference import _mla_row, flashmla, paged_attn
from kernelcat.reference._sequences import GARBAGE
from kernelcat.reference.flashmla import latent
from kernelcat.verify import fuzz, gate

ENTRY = catalog.entry("flashmla")


def inputs(problem: Problem, seed: int = 0) -> dict[str, np.ndarray]:
    return gate.drawn(ENTRY, problem, np, seed)


@settings(max_examples=60, deadline=None)
@given(problem=fuzz.problems(ENTRY), seed=st.integers(0, 3))
def test_visible_tokens_are_numbers_and_all_other_slots_are_poison(
    problem: Problem, seed: int
) -> None:
    drawn, size = inputs(problem, seed), problem["page_size"]
    q_lens = [after - before for before, after in pairwise(drawn["cu_q"].tolist())]
    kv_lens, table, cache = drawn["kv_lens"].tolist(), drawn["block_table"], drawn["kv_cache"]
    assert (tuple(q_lens), tuple(kv_lens)) == paged_attn.lengths(problem)
    assert drawn["cu_q"][-1] == problem["tokens"] and max(q_lens, default=0) <= problem["max_q"]
    readable = np.zeros(cache.shape[:2], bool)
    for s, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        assert q_len <= kv_len <= problem["table_width"] * size
        for token in range(kv_len):
            readable[table[s, token // size], token % size] = True
        assert (table[s, -(-kv_len // size) :] == GARBAGE).all()
    if problem["kv_dtype"] == flashmla.PACKED_TYPE:
        assert cache.shape[2] == 656
        assert (cache[~readable] == flashmla.POISON).all()
        cache = _mla_row.unpack(cache.astype("uint8"))
    assert cache.shape[2] == 576
    assert (np.isnan(cache).all(2) == ~readable).all()
    assert not np.isnan(cache[readable]).any()


def test_ragged_batches_have_empty_sequences_and_whole_pages() -> None:
    ragged = latent(6, 2, 16, 384, lengths="ragged").values
    lengths = [
        paged_attn.lengths(ENTRY.problem(**{**ragged, "max_q": 3, "pages": pages}))
        for pages in range(1, 40)
    ]
    assert {0, 1, 63, 64, 65, 384} <= {length for _, kv_lens in lengths for length in kv_lens}
    assert {count for q_lens, _ in lengths for count in q_lens} == {0, 1, 2, 3}


E4M3 = dtypes.decode(np.arange(256, dtype="uint8"), "float8_e4m3fn")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), power=st.integers(-20, 100))
def test_a_packed_row_has_the_documented_format(seed: int, power: int) -> None:
    random = np.random.default_rng(seed)
    row = random.standard_normal(576) * 2.0**power
    row[: random.integers(512)] *= 1e-6  # so that some groups have the smallest scale
    row = dtypes.decode(dtypes.encode(np.float32(row), "bfloat16"), "bfloat16")
    packed = _mla_row.pack(row)
    assert packed.shape == (656,) and packed.dtype == np.uint8
    scales = struct.unpack("<4f", packed[512:528].tobytes())
    decoded = np.array([E4M3[packed[i]] * scales[i // 128] for i in range(512)])
    rope_bits = struct.unpack("<64I", b"".join(b"\0\0" + packed[i : i + 2].tobytes()
                                            for i in range(528, 656, 2)))  # fmt: skip
    assert np.array_equal(np.uint32(rope_bits).view("float32"), row[512:])
    assert np.array_equal(_mla_row.unpack(packed), np.concatenate((decoded, row[512:])))
    for group, scale in enumerate(scales):
        part = slice(128 * group, 128 * (group + 1))
        absmax = abs(row[part]).max()
        assert np.frexp(scale)[0] == 0.5 and absmax <= 448 * scale
        assert scale == 2.0**-13 or absmax > 224 * scale
        assert (
            abs(decoded[part] - row[part]) <= np.maximum(abs(row[part]) / 16, scale / 1024)
        ).all()


def test_sm_scale_is_required_and_positive() -> None:
    axes = latent(2, 1, 16, 64).values
    without = {name: value for name, value in axes.items() if name != "sm_scale"}
    with pytest.raises(InvalidArgument, match="flashmla also needs sm_scale"):
        ENTRY.problem(**without)
    for value in (0.0, -1.0):
        with pytest.raises(InvalidArgument, match="sm_scale must be positive"):
            ENTRY.problem(**{**axes, "sm_scale": value})
    drawn, out = inputs(latent(2, 1, 16, 64)), []
    for scale in (1e-9, 1e3):
        problem = ENTRY.problem(**{**axes, "sm_scale": scale})
        out.append(ENTRY.oracle(problem, drawn)["out"])
    cached = drawn["kv_cache"][drawn["block_table"][:, 0], :, :512]
    assert np.allclose(out[0], cached.mean(1)[:, None], atol=1e-5)
    nearest = (drawn["q"] @ drawn["kv_cache"][drawn["block_table"][:, 0]].swapaxes(1, 2)).argmax(2)
    assert np.allclose(out[1], np.take_along_axis(cached, nearest[..., None], 1), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_dtype": "float16"}, r"kv_dtype is dtype \(bfloat16\) or uint8, rows of 656 bytes"),
        ({"kv_dtype": "float8_e4m3fn"}, "use one of: bfloat16, float16, uint8"),
        ({"tokens": 9}, r"more query tokens than batch \* max_q"),
        ({"heads": 0}, "needs a query head"),
        ({"pages": 0}, "the cache has no page"),
        ({"page_size": 32}, "use one of: 1, 16, 64, 128"),
        ({"sm_scale": float("inf")}, "sm_scale=inf must be a finite number"),
    ],
)
def test_inconsistent_problems_are_refused_with_a_reason(changes: dict, reason: str) -> None:
    axes = latent(4, 2, 16, 128).values
    with pytest.raises(InvalidArgument, match=reason):
        ENTRY.problem(**{**axes, **changes})


def test_flops_and_bytes_count_the_visible_tokens_only() -> None:
    decode = latent(3, 1, 16, 100)
    assert (
        paged_attn.tokens_read(decode) == 3 * 128
    )  # the lengths of the inputs are rounded up to whole pages
    assert ENTRY.flops(decode) == 3 * 2 * 16 * (576 + 512) * 128
    query_bytes = 3 * 16 * (2 * (576 + 512) + 4)
    assert ENTRY.bytes_moved(decode) == 3 * 128 * 1152 + query_bytes
    packed = latent(3, 1, 16, 100, kv_dtype="uint8")
    assert ENTRY.bytes_moved(packed) == 3 * 128 * 656 + query_bytes
    four_queries = latent(1, 4, 16, 64)
    assert ENTRY.flops(four_queries) == 2 * 16 * (576 + 512) * (61 + 62 + 63 + 64)
    assert ENTRY.bytes_moved(four_queries) == 64 * 1152 + 4 * 16 * (2 * (576 + 512) + 4)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "uint8"])
def test_a_query_without_visible_tokens_gets_zeros(kv_dtype: str) -> None:
    problem = latent(2, 2, 16, 64, kv_dtype=kv_dtype)
    arrays = inputs(problem) | {"kv_lens": np.array([0, 1], "int32")}
    results = ENTRY.oracle(problem, arrays)
    assert (results["out"][:3] == 0).all() and (results["lse"][:3] == -np.inf).all()
    row = arrays["kv_cache"][arrays["block_table"][1, 0], 0]
    row = _mla_row.unpack(row.astype("uint8")) if kv_dtype == "uint8" else row
    assert np.allclose(results["out"][3], row[:512]) and np.isfinite(results["lse"][3]).all()

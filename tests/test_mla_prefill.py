"""`mla.prefill` equals attention in latent space, which the oracle of `flashmla` computes."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from kernelcat import catalog, dtypes
from kernelcat.layers import mla, mla_prefill
from kernelcat.reference import _mla_row
from kernelcat.reference._sequences import GARBAGE

HEADS, NOPE, V, PAGE_SIZE, WIDTH, SCALE = 3, 32, 24, 16, 5, 0.12
Q_LENS, KV_LENS = (9, 0, 17, 1, 16), (60, 30, 17, 80, 33)
LENGTHS = {"kv_lens": KV_LENS, "q_lens": Q_LENS}
BATCH, TOKENS = len(Q_LENS), sum(Q_LENS)
PAGES = BATCH * WIDTH


def drawn() -> dict[str, torch.Tensor]:
    """Arguments of `mla.prefill`: slots without a token are NaN, unused table entries garbage."""
    torch.manual_seed(0)
    cache = torch.randn(PAGES, PAGE_SIZE, 576)
    table = torch.randperm(PAGES).view(BATCH, WIDTH).int()
    for s, kv_len in enumerate(KV_LENS):
        for i, page in enumerate(table[s].tolist()):
            cache[page, max(kv_len - i * PAGE_SIZE, 0) :] = float("nan")
        table[s, -(-kv_len // PAGE_SIZE) :] = GARBAGE
    return {
        "q_nope": torch.randn(TOKENS, HEADS, NOPE),
        "q_pe": torch.randn(TOKENS, HEADS, 64),
        "kv_b": torch.randn(HEADS * (NOPE + V), 512) * 512**-0.5,
        "kv_cache": cache,
        "block_table": table,
    }


def in_latent_space(arrays: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """out (TOKENS, HEADS, V) and lse (TOKENS, HEADS), with absorbed weights, by the oracle."""
    entry, cache = catalog.entry("flashmla"), arrays["kv_cache"]
    w_uk, w_uv = mla.split(arrays["kv_b"], HEADS, NOPE)
    problem = entry.problem(
        batch=BATCH, tokens=TOKENS, heads=HEADS, pages=PAGES, table_width=WIDTH, max_q=max(Q_LENS),
        page_size=PAGE_SIZE, dtype="bfloat16", sm_scale=SCALE,
        kv_dtype="uint8" if cache.dtype == torch.uint8 else "bfloat16",
    )  # fmt: skip
    found = entry.oracle(problem, {
        "q": mla.absorb(arrays["q_nope"], arrays["q_pe"], w_uk).numpy(),
        "kv_cache": cache.float().numpy(), "block_table": arrays["block_table"].numpy(),
        "kv_lens": np.array(KV_LENS, "int32"),
        "cu_q": np.array([*accumulate(Q_LENS, initial=0)], "int32"),
    })  # fmt: skip
    return mla.expand(torch.from_numpy(found["out"]), w_uv), torch.from_numpy(found["lse"])


@pytest.mark.parametrize("context_step", [1, 7, 16, 1000])
@pytest.mark.parametrize("is_packed", [False, True])
def test_prefill_equals_attention_in_latent_space(is_packed: bool, context_step: int) -> None:
    arrays = drawn()
    if is_packed:
        arrays["kv_cache"] = torch.from_numpy(_mla_row.pack(arrays["kv_cache"].numpy()))
    out, lse = mla.prefill(**arrays, **LENGTHS, sm_scale=SCALE, context_step=context_step)
    expected_out, expected_lse = in_latent_space(arrays)
    assert out.shape == (TOKENS, HEADS, V) and out.is_contiguous()
    assert torch.allclose(out, expected_out, atol=2e-5)
    assert torch.allclose(lse, expected_lse, atol=2e-5)


def test_keys_are_made_for_a_limited_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, keys_and_values = [], mla_prefill.keys_and_values

    def count(rows, *more):
        counts.append(len(rows))
        return keys_and_values(rows, *more)

    monkeypatch.setattr(mla_prefill, "keys_and_values", count)
    mla.prefill(**drawn(), **LENGTHS, sm_scale=SCALE, context_step=25)
    assert counts == [25, 25, 1, 9, 17, 25, 25, 25, 4, 1, 17, 16]


def test_no_new_tokens_give_empty_results() -> None:
    arrays = drawn()
    for name in ("q_nope", "q_pe"):
        arrays[name] = arrays[name][:0]
    out, lse = mla.prefill(**arrays, kv_lens=KV_LENS, q_lens=(0,) * BATCH, sm_scale=SCALE)
    assert out.shape == (0, HEADS, V) and lse.shape == (0, HEADS)


def test_unpack_equals_its_reference() -> None:
    """Every float8 code, with scales from 2^-128 to 2^127; a NaN stays a NaN."""
    rows = np.random.default_rng(0).integers(0, 256, (64, 656), dtype="uint8")
    rows[:, 512:528] = np.ldexp(np.float32(1), np.arange(-128, 128).reshape(64, 4) // 4).view("u1")
    unpacked = mla_prefill.unpack(torch.from_numpy(rows)).float().numpy()
    expected = dtypes.encode(_mla_row.unpack(rows), "bfloat16")
    assert np.array_equal(unpacked, dtypes.decode(expected, "bfloat16"), equal_nan=True)


def test_flash_attention_equals_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's operator for CPUs, which has the same arguments as that for GPUs."""
    aten = torch.ops.aten
    monkeypatch.setattr(
        aten,
        "_scaled_dot_product_flash_attention",
        aten._scaled_dot_product_flash_attention_for_cpu,
    )
    torch.manual_seed(3)
    q, k, v = (torch.randn(n, HEADS, d) for n, d in ((20, 192), (20, 192), (20, 128)))
    for is_causal, part in ((True, slice(0, 20)), (False, slice(4, 9))):
        case = q[part], k, v, 192**-0.5, is_causal
        results, references = mla_prefill.attend_flash(*case), mla_prefill.attend_plainly(*case)
        for result, expected in zip(results, references, strict=True):
            assert result.shape == expected.shape
            assert torch.allclose(result, expected, atol=1e-5)


def test_torchs_operator_for_gpus_takes_the_same_arguments() -> None:
    q, k, v = (
        torch.empty(n, 128, d, dtype=torch.bfloat16, device="meta")
        for n, d in ((100, 192), (333, 192), (333, 128))
    )
    out, lse = mla_prefill.attend_flash(q, k, v, 0.1, False)
    assert (out.shape, out.dtype) == ((100, 128, 128), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((100, 128), torch.float32)


def test_merge_equals_the_oracle_of_attn_merge() -> None:
    torch.manual_seed(4)
    outs, lses = torch.randn(2, 9, HEADS, 64), 3 * torch.randn(2, 9, HEADS)
    entry = catalog.entry("attn_merge")
    problem = entry.problem(parts=2, tokens=9, heads=HEADS, head_dim=64, dtype="bfloat16")
    expected = entry.oracle(problem, {"outs": outs.numpy(), "lses": lses.numpy()})
    out, lse = mla_prefill.merge(*zip(outs, lses, strict=True))
    assert np.allclose(out, expected["out"], atol=1e-6)
    assert np.allclose(lse, expected["lse"], atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_cache": torch.zeros(PAGES, PAGE_SIZE, 512)}, "576 or 656"),
        ({"kv_b": torch.zeros(HEADS * NOPE, 512)}, "96 rows of kv_b are not 3 heads of 32"),
        ({"kv_b": torch.zeros(HEADS * (NOPE + V) + 1, 512)}, "169 rows of kv_b"),
        ({"kv_lens": KV_LENS[1:]}, "5 sequences, kv_lens 4 and q_lens 5"),
        ({"block_table": torch.zeros(4, WIDTH).int()}, "4 sequences, kv_lens 5 and q_lens 5"),
        ({"q_lens": (10, *Q_LENS[1:])}, "both must have 44, the sum of q_lens"),
        ({"q_pe": torch.zeros(1, HEADS, 64)}, "q_pe 1; both must have 43"),
        ({"kv_lens": (8, *KV_LENS[1:])}, "sequence 0: q_len=9 and kv_len=8"),
        ({"kv_lens": (81, *KV_LENS[1:])}, "0 <= q_len <= kv_len <= 80"),
        ({"context_step": 0}, "context_step=0 must be positive"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(changes: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        mla.prefill(**{**drawn(), **LENGTHS, "sm_scale": SCALE, **changes})

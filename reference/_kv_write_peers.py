"""Peers of `kv_write`, and what they share with `mla_kv_write`'s: torch, and FlashInfer."""

from __future__ import annotations

from typing import Any, NamedTuple

from kernelcat import dtypes
from kernelcat.errors import Unsupported
from kernelcat.reference._flashinfer import PageLists, import_flashinfer, page_lists
from kernelcat.reference._new_tokens import lengths, positions
from kernelcat.reference._peers import import_torch


def rotate(torch, x, cos, sin, interleaved):
    """x (tokens, heads, head_dim) by cos and sin (tokens, 1, rotary_dim / 2), in float32."""
    half = cos.shape[-1]
    pairs, rest = x.float().split((2 * half, x.shape[-1] - 2 * half), -1)
    if interleaved:
        first, second = pairs[..., ::2], pairs[..., 1::2]
    else:
        first, second = pairs.chunk(2, -1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat((rotated, rest), -1)


def slots(torch, arrays, tokens: int, page_size: int):
    """Position and page, each int64 (tokens,), of the new tokens."""
    cu_q = arrays["cu_q"]
    token = torch.arange(tokens, dtype=torch.int32, device=cu_q.device)
    s = torch.searchsorted(cu_q, token, right=True) - 1
    at = (arrays["kv_lens"][s] - cu_q[s + 1] + token).long()
    return at, arrays["block_table"][s, at // page_size].long()


class Appended(NamedTuple):
    """New tokens in FlashInfer's form: sequence and position of each, int32, and page lists."""

    sequences: Any
    at: Any
    pages: PageLists


def appended(torch, problem, arrays) -> Appended:
    """The new tokens of ``problem`` in FlashInfer's form, made on the device of ``arrays``."""
    (q_lens, kv_lens), device = lengths(problem), arrays["cu_q"].device
    owners = [s for s, q_len in enumerate(q_lens) for _ in range(q_len)]
    return Appended(
        torch.tensor(owners, dtype=torch.int32, device=device),
        torch.tensor(positions(problem), dtype=torch.int32, device=device),
        page_lists(arrays["block_table"], kv_lens, problem["page_size"], device),
    )


def torch_write():
    """The definition in torch's operators, fused by ``torch.compile``."""
    torch = import_torch("torch")

    @torch.compile(fullgraph=True, dynamic=False)
    def run(arrays, interleaved, page_scales):
        size = arrays["k_cache"].shape[1]
        at, page = slots(torch, arrays, len(arrays["q"]), size)
        cos, sin = arrays["cos_sin"][at][:, None].chunk(2, -1)
        arrays["q_out"].copy_(rotate(torch, arrays["q"], cos, sin, interleaved))
        k = rotate(torch, arrays["k"], cos, sin, interleaved)
        for name, x in (("k", k), ("v", arrays["v"].float())):
            cache = arrays[f"{name}_cache"]
            if f"{name}_scale" in arrays:
                scale = arrays[f"{name}_scale"]
                x = x / (scale[page] if page_scales else scale)[..., None]
            if cache.dtype == torch.float8_e4m3fn:  # torch cannot assign to an index of float8
                x = x.clamp(-dtypes.E4M3_MAX, dtypes.E4M3_MAX).to(cache.dtype).view(torch.uint8)
                cache = cache.view(torch.uint8)
            cache[page, at % size] = x.to(cache.dtype)

    def make(problem, arrays):
        if not problem["tokens"] or not problem["rotary_dim"]:
            raise Unsupported("torch is not raced where tokens or rotary_dim is 0")
        interleaved, page_scales = problem["style"] == "interleaved", problem["page_scales"]
        return lambda: run(arrays, interleaved, page_scales)

    return make


def torch_projected_write():
    """RMSNorm, one product with all weights, then :func:`torch_write`.

    The weights are joined before the race, as a checkpoint with a fused projection has them.
    """
    torch, write = import_torch("torch"), torch_write()

    @torch.compile(fullgraph=True, dynamic=False)
    def normalize(x, weight, eps):
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    def make(problem, arrays):
        if not problem["tokens"] or not problem["hidden"] or not problem["rotary_dim"]:
            raise Unsupported("torch is not raced where tokens, hidden or rotary_dim is 0")
        weights = torch.cat([arrays[f"w{name}"].flatten(0, 1) for name in "qkv"])
        bias = (
            torch.cat([arrays[f"b{name}"].flatten() for name in "qkv"]) if problem["bias"] else None
        )
        heads = [problem[axis] for axis in ("heads", "kv_heads", "kv_heads")]

        def run():
            a = normalize(arrays["x"], arrays["norm_weight"], problem["eps"])
            z = torch.nn.functional.linear(a, weights, bias)
            parts = z.unflatten(1, (sum(heads), problem["head_dim"])).split(heads, 1)
            write(problem, {**arrays, **dict(zip("qkv", parts, strict=True))})()

        return run

    return make


def flashinfer_write():
    """FlashInfer's RoPE, then its append; their index arrays are made before the race."""
    library, torch = import_flashinfer(), import_torch("flashinfer")
    rope = library.rope._apply_rope_pos_ids_cos_sin_cache  # the public functions allocate outputs

    def make(problem, arrays):
        if problem["kv_dtype"] != problem["dtype"] or problem["has_scales"]:
            raise Unsupported("FlashInfer is raced without scales, over a cache of k's type")
        if not problem["tokens"] * problem["heads"] * problem["rotary_dim"]:
            raise Unsupported("FlashInfer is not raced where tokens, heads or rotary_dim is 0")
        new = appended(torch, problem, arrays)
        k, caches = torch.empty_like(arrays["k"]), (arrays["k_cache"], arrays["v_cache"])

        def run():
            angles = (arrays["cos_sin"], new.at, problem["style"] == "interleaved")
            rope(arrays["q"], arrays["k"], arrays["q_out"], k, *angles)
            library.append_paged_kv_cache(
                k, arrays["v"], new.sequences, new.at, caches, new.pages.indices,
                new.pages.indptr, new.pages.last_page_len,
            )  # fmt: skip

        return run

    return make

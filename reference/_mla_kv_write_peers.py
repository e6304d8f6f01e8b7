"""Peers of `mla_kv_write`: its definition in torch, and FlashInfer's RoPE and append."""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.errors import Unsupported
from kernelcat.reference._flashinfer import import_flashinfer
from kernelcat.reference._kv_write_peers import appended, rotate, slots
from kernelcat.reference._mla_row import LATENT, MIN_SCALE, SCALED, SCALES
from kernelcat.reference._peers import import_torch
from kernelcat.reference.flashmla import PACKED_TYPE

_MANTISSA = (1 << 23) - 1
"""Bits of a float32's mantissa."""


def _check(problem, peer: str) -> None:
    if not problem["tokens"] or not problem["rotary_dim"]:
        raise Unsupported(f"{peer} is not raced where tokens or rotary_dim is 0")


def torch_write():
    """The definition in torch's operators, fused by ``torch.compile``."""
    torch = import_torch("torch")

    def quantized(c):
        """Float8 codes (tokens, 512) as bytes, and scales (tokens, 4), of float32 latents ``c``."""
        groups = c.unflatten(1, (-1, SCALED))
        least = (groups.abs().amax(2) / dtypes.E4M3_MAX).clamp_min(MIN_SCALE)
        # The next power of two: the exponent, one higher where the mantissa is not 0.
        bits = (least.view(torch.int32) + _MANTISSA) & ~_MANTISSA
        scale = bits.view(torch.float32)
        codes = (groups / scale[:, :, None]).flatten(1).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), scale

    def latents_and_keys(arrays, interleaved, page_size):
        """Page, slot, float32 latents and float32 rotated keys of the new tokens."""
        at, page = slots(torch, arrays, len(arrays["c"]), page_size)
        cos, sin = arrays["cos_sin"][at][:, None].chunk(2, -1)
        key = rotate(torch, arrays["k_pe"][:, None], cos, sin, interleaved)[:, 0]
        return page, at % page_size, arrays["c"].float(), key

    @torch.compile(fullgraph=True, dynamic=False)
    def write(arrays, interleaved):
        cache = arrays["kv_cache"]
        page, slot, c, key = latents_and_keys(arrays, interleaved, cache.shape[1])
        cache[page, slot] = torch.cat((c, key), 1).to(cache.dtype)

    @torch.compile(fullgraph=True, dynamic=False)
    def write_packed(arrays, codes, scales, keys, interleaved):
        page, slot, c, key = latents_and_keys(arrays, interleaved, codes.shape[1])
        new_codes, new_scales = quantized(c)
        codes[page, slot] = new_codes
        scales[page, slot] = new_scales
        keys[page, slot] = key.to(keys.dtype)

    def make(problem, arrays):
        _check(problem, "torch")
        interleaved, cache = problem["style"] == "interleaved", arrays["kv_cache"]
        if problem["kv_dtype"] != PACKED_TYPE:
            return lambda: write(arrays, interleaved)
        end = LATENT + SCALES
        codes = cache[..., :LATENT]
        scales = cache.view(torch.float32)[..., LATENT // 4 : end // 4]
        keys = cache.view(torch.bfloat16)[..., end // 2 :]
        return lambda: write_packed(arrays, codes, scales, keys, interleaved)

    return make


def flashinfer_write():
    """FlashInfer's RoPE, then its append; their index arrays are made before the race.

    FlashInfer keeps latents and keys in two caches, whose rows may be far apart: here two views of
    the one cache.
    """
    library, torch = import_flashinfer(), import_torch("flashinfer")
    rope = library.rope._apply_rope_pos_ids_cos_sin_cache  # the public functions allocate outputs

    def make(problem, arrays):
        if problem["kv_dtype"] != problem["dtype"]:
            raise Unsupported("FlashInfer is raced over a cache of c's type")
        _check(problem, "FlashInfer")
        new, cache = appended(torch, problem, arrays), arrays["kv_cache"]
        key = arrays["k_pe"][:, None]
        rotated, none = torch.empty_like(key), key[:, :0]

        def run():
            is_interleaved = problem["style"] == "interleaved"
            rope(key, none, rotated, none, arrays["cos_sin"], new.at, is_interleaved)
            library.page.append_paged_mla_kv_cache(
                arrays["c"], rotated[:, 0], new.sequences, new.at, cache[..., :LATENT],
                cache[..., LATENT:], new.pages.indices, new.pages.indptr, new.pages.last_page_len,
            )  # fmt: skip

        return run

    return make

"""Peers of `mla_kv_write`: its definition in torch, and FlashInfer's RoPE and append."""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.errors import Unsupported
from kernelcat.reference._flashinfer import import_flashinfer
from kernelcat.reference._kv_write_peers import appended, rotate, slots
from kernelcat.reference._mla_row import LATENT, MIN_SCALE, SCALED
from kernelcat.reference._peers import import_torch

_MANTISSA = (1 << 23) - 1
"""Bits of a float32's mantissa."""


def _check(problem, peer: str) -> None:
    if not problem["tokens"] or not problem["rotary_dim"]:
        raise Unsupported(f"{peer} is not raced where tokens or rotary_dim is 0")


def torch_write():
    """The definition in torch's operators, fused by ``torch.compile``."""
    torch = import_torch("torch")

    def packed(c, key):
        """Rows (tokens, 656) of uint8 of float32 latents (tokens, 512) and keys (tokens, 64)."""
        groups = c.unflatten(1, (-1, SCALED))
        least = (groups.abs().amax(2) / dtypes.E4M3_MAX).clamp_min(MIN_SCALE)
        # The next power of two: the exponent, one higher where the mantissa is not 0.
        bits = (least.view(torch.int32) + _MANTISSA) & ~_MANTISSA
        scale = bits.view(torch.float32)
        codes = (groups / scale[:, :, None]).flatten(1).to(torch.float8_e4m3fn)
        parts = (codes, scale, key.to(torch.bfloat16))
        return torch.cat([part.view(torch.uint8) for part in parts], 1)

    @torch.compile(fullgraph=True, dynamic=False)
    def run(arrays, interleaved):
        cache, c = arrays["kv_cache"], arrays["c"].float()
        at, page = slots(torch, arrays, len(c), cache.shape[1])
        cos, sin = arrays["cos_sin"][at][:, None].chunk(2, -1)
        key = rotate(torch, arrays["k_pe"][:, None], cos, sin, interleaved)[:, 0]
        is_packed = cache.dtype == torch.uint8
        rows = packed(c, key) if is_packed else torch.cat((c, key), 1).to(cache.dtype)
        cache[page, at % cache.shape[1]] = rows

    def make(problem, arrays):
        _check(problem, "torch")
        return lambda: run(arrays, problem["style"] == "interleaved")

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

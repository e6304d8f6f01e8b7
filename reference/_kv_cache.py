"""A paged cache of keys and values: element types, shapes and scales.

k_cache and v_cache are (pages, page_size, kv_heads, head_dim) of bfloat16, float16, float8_e4m3fn
or NVFP4. Optional scales multiply the cached values; they are float32 (1, kv_heads), or
(pages, kv_heads) where each page has its own.

NVFP4 is the type float4_e2m1fn_x2: a byte has two E2M1 values, the first one in its low half, so
that rows are head_dim / 2 bytes. Each 16 values of a head have a block scale, a float8_e4m3fn that
is not negative: ``k = e2m1 * k_block_scale * k_scale``. So k_scale and v_scale are what NVFP4 calls
the global scale.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import Axis, Derived, Problem, Tensor, exact

DTYPES = ("bfloat16", "float16")
FP8, NVFP4 = "float8_e4m3fn", "float4_e2m1fn_x2"
SCALED = 16
"""Values that share a block scale in NVFP4."""
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (1, 16, 32, 64, 128)


def scale_rows(axes):
    """Rows of k_scale and v_scale."""
    return axes["pages"] if axes["page_scales"] else 1


def cache_row(axes):
    """Elements in which the cache stores one head of a token."""
    return axes["head_dim"] // 2 if axes["kv_dtype"] == NVFP4 else axes["head_dim"]


def row_bytes(problem: Problem) -> int:
    """Bytes of one head of a token in k_cache or v_cache, block scales included."""
    row = cache_row(problem.values) * dtypes.itemsize(problem["kv_dtype"])
    return int(row + problem["head_dim"] // SCALED * (problem["kv_dtype"] == NVFP4))


def quantize_blocks(values):
    """``values`` divided by a scale for each ``SCALED`` of the last axis, and these scales.

    The largest magnitude of a block becomes about 6, E2M1's largest value. Scales are values of
    float8_e4m3fn; both results are float32.
    """
    blocks = values.reshape(*values.shape[:-1], -1, SCALED)
    scales = abs(blocks).max(-1) / dtypes.E2M1_MAX
    scales = dtypes.decode(dtypes.encode(scales, FP8), FP8)
    return (blocks / scales[..., None]).reshape(values.shape), scales


_SLOTS = ("pages", "page_size", "kv_heads")
CACHE = (*_SLOTS, Derived("head_dim or head_dim/2", cache_row))
BLOCKS = (*_SLOTS, Derived(f"head_dim/{SCALED}", lambda axes: axes["head_dim"] // SCALED))

KV_HEADS = Axis.size("kv_heads", "key-value heads", 1, 4, exact)
HEAD_DIM = Axis.choice("head_dim", "elements of a head", *HEAD_DIMS)
PAGE_SIZE = Axis.choice("page_size", "tokens that a page of the cache holds", *PAGE_SIZES)
SCALE_AXES = (
    Axis.flag("has_scales", "whether k_scale and v_scale are given", minor=True),
    Axis.flag("page_scales", "whether each page has its own k_scale and v_scale", minor=True),
)

_SCALES = (Derived("1 or pages", scale_rows), "kv_heads")
SCALES = (
    Tensor(
        "k_scale", _SCALES, "float32", "k_cache times k_scale are the keys", flag="has_scales"
    ),
    Tensor(
        "v_scale", _SCALES, "float32", "v_cache times v_scale are the values", flag="has_scales"
    ),
)  # fmt: skip

"""What keys and values are multiplied by on their way into a cache."""

import triton
import triton.language as tl


@triton.jit
def inverse_scale(scale, page, head, kv_heads, inside, HAS_SCALES: tl.constexpr,
                  PAGE_SCALES: tl.constexpr):  # fmt: skip
    """What keys or values are multiplied by before they are rounded; 1 without scales.

    scale is (1, kv_heads) float32, or (pages, kv_heads) with PAGE_SCALES. ``head`` is one head or a
    block (BLOCK_H,) of heads, and ``inside`` says which of them have a scale to load.
    """
    inverse = 1.0
    if HAS_SCALES:
        row = page if PAGE_SCALES else 0
        inverse = 1.0 / tl.load(scale + row * kv_heads + head, mask=inside, other=1.0)
    return inverse

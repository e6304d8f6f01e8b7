"""Device code of `squared_relu`: BLOCK elements a program."""

import triton
import triton.language as tl


@triton.jit
def square(x, out, n, BLOCK: tl.constexpr):
    """``out = max(x, 0)^2`` of the first n elements of x and out."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    value = tl.maximum(tl.load(x + offsets, mask=inside).to(tl.float32), 0.0)
    tl.store(out + offsets, (value * value).to(out.dtype.element_ty), mask=inside)

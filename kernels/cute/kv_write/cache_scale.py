"""The scale of a cached key or value."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


@cute.jit
def inverse_scale(
    mS: cute.Tensor,  # (kv_heads, 1 or pages)
    page: Int32,
    head: Int32,
    scales: cutlass.Constexpr,  # "none", "tensor" or "page"
):
    """The factor that a head's key or value is multiplied by before it is stored in ``page``."""
    inverse = Float32(1)
    if cutlass.const_expr(scales == "page"):
        inverse = 1 / mS[head, page]
    elif cutlass.const_expr(scales == "tensor"):
        inverse = 1 / mS[head, 0]
    return inverse

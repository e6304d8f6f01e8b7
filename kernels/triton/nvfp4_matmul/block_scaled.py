"""`nvfp4_matmul` with A in 4 bits, on tensor cores that apply block scales themselves (Blackwell).

Codes and scales come by TMA. A swizzled tile of 128 rows of scales has 512 bytes for every four
blocks of K, one after another, and tensor memory takes them in this form (``tcgen05.cp``). How to
show this to the compiler by a reshape is from Triton's tutorial on block-scaled products.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.common.device.tile_order import locate_tile
from kernelcat.kernels.triton.nvfp4_matmul.device import scale_and_finish


@triton.jit
def load_scales(
    tiles,  # descriptor of (rows / 128, blocks / 4 * 512) bytes, swizzled
    row, block,
):  # fmt: skip
    """Scales (rows, blocks) from (row, block) on, which are multiples of 128 and 4."""
    loaded = tiles.load([row // 128, block // 4 * 512])
    rows: tl.constexpr = loaded.shape[0]
    cols: tl.constexpr = loaded.shape[1] // 512
    return loaded.reshape(rows, cols, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(rows * 128, cols * 4)


@triton.jit
def block_scaled(
    a,  # descriptor of (M, K / 2) bytes
    a_block_scale,  # descriptor of (ceil(M / 128), swizzled bytes)
    w,  # descriptor of (N, K / 2) bytes
    w_scale,  # descriptor of (ceil(N / 128), swizzled bytes)
    global_scale,  # (1,) float32, of NVFP4
    bias,  # (N,)
    d,  # (M, N), or (M, N // 2) for swiglu
    M, N, K,
    NVFP4: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """One tile a program in grouped order; TMA fills in zeros past the edges."""
    SIZE: tl.constexpr = 16 if NVFP4 else 32
    tile_m, tile_n = locate_tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a_scales = load_scales(a_block_scale, row, k // SIZE)
        w_scales = load_scales(w_scale, col, k // SIZE)
        acc = tl.dot_scaled(
            a.load([row, k // 2]), a_scales, "e2m1", w.load([col, k // 2]).T, w_scales, "e2m1", acc
        )  # fmt: skip
    scale_and_finish(
        acc, global_scale, global_scale, bias, d, row, col, M, N,
        NVFP4, False, HAS_BIAS, ACTIVATION,
    )  # fmt: skip

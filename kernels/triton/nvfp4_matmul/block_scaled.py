"""`nvfp4_matmul` with A in 4 bits on tensor cores that scale blocks themselves (Blackwell).

Codes and scales come by TMA. A swizzled tile of 128 rows of scales is 512 bytes for every four
blocks of K, one after another, which is how tensor memory takes them (``tcgen05.cp``); that the
compiler sees so from a reshape is shown in Triton's tutorial on block-scaled products.
"""

import triton
import triton.language as tl

from kernelcat.kernels.triton.gemm.device import tile_of
from kernelcat.kernels.triton.nvfp4_matmul.device import write


@triton.jit
def scales(tiles, row, block):
    """(rows, blocks) of scales from (row, block) on, multiples of 128 and 4, of swizzled ``tiles``.

    tiles : descriptor of (rows / 128, blocks / 4 * 512) bytes
    """
    found = tiles.load([row // 128, block // 4 * 512])
    rows: tl.constexpr = found.shape[0]
    cols: tl.constexpr = found.shape[1] // 512
    return found.reshape(rows, cols, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(rows * 128, cols * 4)


@triton.jit
def block_scaled(
    a, a_block_scale, w, w_scale, global_scale, bias, d, M, N, K,
    NVFP4: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """A tile a program in grouped order. Operands are descriptors; past edges they are zeros."""
    SIZE: tl.constexpr = 16 if NVFP4 else 32
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a_scales = scales(a_block_scale, row, k // SIZE)
        w_scales = scales(w_scale, col, k // SIZE)
        acc = tl.dot_scaled(
            a.load([row, k // 2]), a_scales, "e2m1", w.load([col, k // 2]).T, w_scales, "e2m1", acc
        )  # fmt: skip
    write(
        acc, global_scale, global_scale, bias, d, row, col, M, N,
        NVFP4, False, HAS_BIAS, ACTIVATION,
    )  # fmt: skip

"""`flashmla` in CUDA C++: one warp per query and head, mma.sync for few rows and for float8, wgmma,
and pairs of thread blocks for many rows."""

from kernelcat.kernels.cuda.flashmla import mma, naive, pair, wgmma

IMPLEMENTATIONS = (
    naive.IMPLEMENTATION,
    mma.IMPLEMENTATION,
    wgmma.IMPLEMENTATION,
    pair.IMPLEMENTATION,
)

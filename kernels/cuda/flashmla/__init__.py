"""`flashmla` in CUDA C++: one warp per query and head, mma.sync for few rows and for float8, wgmma,
the same with its work dealt out by cost, and pairs of thread blocks for many rows."""

from kernelcat.kernels.cuda.flashmla import dealt, mma, naive, pair, wgmma

IMPLEMENTATIONS = (
    naive.IMPLEMENTATION,
    mma.IMPLEMENTATION,
    wgmma.IMPLEMENTATION,
    dealt.IMPLEMENTATION,
    pair.IMPLEMENTATION,
)

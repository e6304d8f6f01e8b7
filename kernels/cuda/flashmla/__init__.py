"""`flashmla` in CUDA C++: a warp a query and head, mma.sync for few rows and for float8, wgmma, and
clusters of two for many."""

from kernelcat.kernels.cuda.flashmla import mma, naive, pair, wgmma

IMPLEMENTATIONS = (
    naive.IMPLEMENTATION,
    mma.IMPLEMENTATION,
    wgmma.IMPLEMENTATION,
    pair.IMPLEMENTATION,
)

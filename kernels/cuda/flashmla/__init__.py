"""`flashmla` in CUDA C++: a warp a query and head, mma.sync for few rows, wgmma for many."""

from kernelcat.kernels.cuda.flashmla import mma, naive, wgmma

IMPLEMENTATIONS = (naive.IMPLEMENTATION, mma.IMPLEMENTATION, wgmma.IMPLEMENTATION)

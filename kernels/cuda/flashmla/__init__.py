"""`flashmla` in CUDA C++: a warp a query and head, and wgmma over tiles of heads and tokens."""

from kernelcat.kernels.cuda.flashmla import naive, wgmma

IMPLEMENTATIONS = (naive.IMPLEMENTATION, wgmma.IMPLEMENTATION)

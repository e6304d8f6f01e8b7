"""`flashmla` in CUDA C++."""

from kernelcat.kernels.cuda.flashmla import naive

IMPLEMENTATIONS = (naive.IMPLEMENTATION,)

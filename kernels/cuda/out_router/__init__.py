"""`out_router` in CUDA C++: a baseline, and weights that stream once for few tokens."""

from kernelcat.kernels.cuda.out_router import naive, streamed

IMPLEMENTATIONS = (naive.IMPLEMENTATION, streamed.IMPLEMENTATION)

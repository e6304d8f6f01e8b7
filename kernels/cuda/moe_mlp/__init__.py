"""`moe_mlp` in CUDA C++: a baseline, streamed weights for few tokens, grouped products for many."""

from kernelcat.kernels.cuda.moe_mlp import grouped, naive, stream

IMPLEMENTATIONS = (naive.IMPLEMENTATION, stream.IMPLEMENTATION, grouped.IMPLEMENTATION)

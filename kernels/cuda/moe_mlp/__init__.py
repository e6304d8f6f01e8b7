"""`moe_mlp` in CUDA C++: a baseline, and weights that stream through tensor cores."""

from kernelcat.kernels.cuda.moe_mlp import naive, stream

IMPLEMENTATIONS = (naive.IMPLEMENTATION, stream.IMPLEMENTATION)

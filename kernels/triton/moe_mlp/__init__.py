"""`moe_mlp` in Triton: a baseline, both products for few tokens, and grouped products for many."""

from kernelcat.kernels.triton.moe_mlp import few, grouped, naive

IMPLEMENTATIONS = (naive.IMPLEMENTATION, grouped.IMPLEMENTATION, few.IMPLEMENTATION)

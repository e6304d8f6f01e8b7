"""`moe_mlp` in CUDA C++: a baseline, one token, weights streamed for few, grouped for many."""

from kernelcat.kernels.cuda.moe_mlp import grouped, naive, single, stream

IMPLEMENTATIONS = (
    naive.IMPLEMENTATION,
    single.IMPLEMENTATION,
    stream.IMPLEMENTATION,
    grouped.IMPLEMENTATION,
)

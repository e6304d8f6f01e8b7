"""`nvfp4_matmul` in CUDA C++: a baseline, mma.sync for few rows of A, wgmma for many."""

from kernelcat.kernels.cuda.nvfp4_matmul import boxes, mma, naive, stream_k, wgmma

IMPLEMENTATIONS = (
    naive.IMPLEMENTATION,
    mma.IMPLEMENTATION,
    wgmma.IMPLEMENTATION,
    boxes.IMPLEMENTATION,
    stream_k.IMPLEMENTATION,
)

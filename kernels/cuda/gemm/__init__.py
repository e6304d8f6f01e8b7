"""`gemm` in CUDA C++: from one thread an element to a warp-specialized Hopper kernel."""

from kernelcat.kernels.cuda.gemm import (
    cluster_split,
    fitted,
    naive,
    stream_k,
    streamed,
    tiled,
    tma,
    wgmma,
)

IMPLEMENTATIONS = (
    naive.IMPLEMENTATION,
    tiled.IMPLEMENTATION,
    tma.IMPLEMENTATION,
    wgmma.IMPLEMENTATION,
    fitted.IMPLEMENTATION,
    stream_k.IMPLEMENTATION,
    cluster_split.IMPLEMENTATION,
    streamed.IMPLEMENTATION,
)

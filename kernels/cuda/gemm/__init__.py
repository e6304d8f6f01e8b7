"""`gemm` in CUDA C++: from one thread an element to a warp-specialized Hopper kernel."""

from kernelcat.kernels.cuda.gemm import naive, tiled, tma, wgmma

IMPLEMENTATIONS = (
    naive.IMPLEMENTATION,
    tiled.IMPLEMENTATION,
    tma.IMPLEMENTATION,
    wgmma.IMPLEMENTATION,
)

"""`paged_attn` in CUDA C++: naive, one for all shapes, one for prefill and two for decode."""

from kernelcat.kernels.cuda.paged_attn import naive, registers, split, tma, wgmma

IMPLEMENTATIONS = (
    naive.IMPLEMENTATION,
    registers.IMPLEMENTATION,
    split.IMPLEMENTATION,
    wgmma.IMPLEMENTATION,
    tma.IMPLEMENTATION,
)

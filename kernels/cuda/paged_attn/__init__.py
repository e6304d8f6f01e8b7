"""`paged_attn` in CUDA C++: naive, one for all shapes, one for prefill and three for decode."""

from kernelcat.kernels.cuda.paged_attn import naive, registers, split, staged, tma, wgmma

IMPLEMENTATIONS = (
    naive.IMPLEMENTATION,
    registers.IMPLEMENTATION,
    split.IMPLEMENTATION,
    staged.IMPLEMENTATION,
    wgmma.IMPLEMENTATION,
    tma.IMPLEMENTATION,
)

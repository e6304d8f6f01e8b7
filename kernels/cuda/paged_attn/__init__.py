"""`paged_attn` in CUDA C++: naive, one for all shapes, one for prefill and one for decode."""

from kernelcat.kernels.cuda.paged_attn import naive, split, tma, wgmma

IMPLEMENTATIONS = (
    naive.IMPLEMENTATION,
    split.IMPLEMENTATION,
    wgmma.IMPLEMENTATION,
    tma.IMPLEMENTATION,
)

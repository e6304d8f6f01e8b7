"""`paged_attn` in CUDA C++: naive, two for all shapes, one for prefill and three for decode."""

from kernelcat.kernels.cuda.paged_attn import dealt, naive, registers, split, staged, tma, wgmma

IMPLEMENTATIONS = (
    naive.IMPLEMENTATION,
    registers.IMPLEMENTATION,
    split.IMPLEMENTATION,
    dealt.IMPLEMENTATION,
    staged.IMPLEMENTATION,
    wgmma.IMPLEMENTATION,
    tma.IMPLEMENTATION,
)

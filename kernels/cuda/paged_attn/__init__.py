"""`paged_attn` in CUDA C++: a warp a query and head, tiles that share keys, wgmma for prefill, TMA
for decode."""

from kernelcat.kernels.cuda.paged_attn import naive, split, tma, wgmma

IMPLEMENTATIONS = (
    naive.IMPLEMENTATION,
    split.IMPLEMENTATION,
    wgmma.IMPLEMENTATION,
    tma.IMPLEMENTATION,
)

"""`paged_attn` in CUDA C++: a warp a query and head, tiles that share keys, wgmma for prefill."""

from kernelcat.kernels.cuda.paged_attn import naive, split, wgmma

IMPLEMENTATIONS = (naive.IMPLEMENTATION, wgmma.IMPLEMENTATION, split.IMPLEMENTATION)

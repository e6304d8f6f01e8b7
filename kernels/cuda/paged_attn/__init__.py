"""`paged_attn` in CUDA C++: a warp a query and head, and tiles of all that share keys."""

from kernelcat.kernels.cuda.paged_attn import naive, split

IMPLEMENTATIONS = (naive.IMPLEMENTATION, split.IMPLEMENTATION)

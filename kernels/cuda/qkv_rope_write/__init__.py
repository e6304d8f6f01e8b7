"""`qkv_rope_write` in CUDA C++: a baseline, weights that stream once, and products by wgmma."""

from kernelcat.kernels.cuda.qkv_rope_write import naive, products, streamed

IMPLEMENTATIONS = (naive.IMPLEMENTATION, streamed.IMPLEMENTATION, products.IMPLEMENTATION)

"""`qkv_rope_write` in CUDA C++: a baseline, and weights that stream once for few tokens."""

from kernelcat.kernels.cuda.qkv_rope_write import naive, streamed

IMPLEMENTATIONS = (naive.IMPLEMENTATION, streamed.IMPLEMENTATION)

"""`out_router` in CUDA C++: a baseline, weights that stream once, and a product by wgmma."""

from kernelcat.kernels.cuda.out_router import naive, products, streamed

IMPLEMENTATIONS = (naive.IMPLEMENTATION, streamed.IMPLEMENTATION, products.IMPLEMENTATION)

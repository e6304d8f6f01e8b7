"""`moe_mlp` in CuTe DSL: a baseline and grouped products, both made of other entries' programs.

The device code is that of `moe_route`, `moe_gemm` and `fp8_quantize`.
"""

from kernelcat.kernels.cute.moe_mlp import grouped, naive

IMPLEMENTATIONS = (naive.IMPLEMENTATION, grouped.IMPLEMENTATION)

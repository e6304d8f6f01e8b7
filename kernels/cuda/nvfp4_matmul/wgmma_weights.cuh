// Hopper's warpgroup matrix instruction (sm_90a) with weights in registers.
#pragma once

#include <kernelcat/wgmma.cuh>

namespace kernelcat {

// WgmmaWeights<T, N>::multiply: d = a @ b^T (+ d if `accumulate`), a 64 x 16 in registers (each
// warp its 16 rows, in mma.sync's layout), b N x 16 in shared memory, d 64 x N float32 in the
// layout of Wgmma.
template <typename T, int N>
struct WgmmaWeights;

// clang-format off
// COUNT is N / 2; A0 to A3, B and P are the numbers of the operands a, b and `accumulate`.
#define KERNELCAT_WGMMA_WEIGHTS(TYPE, NAME, N, COUNT, A0, A1, A2, A3, B, P)                    \
  template <>                                                                                  \
  struct WgmmaWeights<TYPE, N> {                                                               \
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], const uint32_t (&a)[4], \
                                                    uint64_t b, bool accumulate) {             \
      asm volatile(                                                                            \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                     \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {"                 \
          KERNELCAT_REGISTERS_##COUNT "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B      \
          ", p, 1, 1, 0;\n}\n"                                                                 \
          : KERNELCAT_OUTPUTS_##COUNT                                                          \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                                \
            "r"(static_cast<int>(accumulate)));                                                \
    }                                                                                          \
  };
#define KERNELCAT_WGMMA_WEIGHTS_TYPES(N, COUNT, A0, A1, A2, A3, B, P)                  \
  KERNELCAT_WGMMA_WEIGHTS(bfloat16, "bf16", N, COUNT, A0, A1, A2, A3, B, P)            \
  KERNELCAT_WGMMA_WEIGHTS(float16, "f16", N, COUNT, A0, A1, A2, A3, B, P)

KERNELCAT_WGMMA_WEIGHTS_TYPES(64, 32, 32, 33, 34, 35, 36, 37)
KERNELCAT_WGMMA_WEIGHTS_TYPES(128, 64, 64, 65, 66, 67, 68, 69)
KERNELCAT_WGMMA_WEIGHTS_TYPES(192, 96, 96, 97, 98, 99, 100, 101)
KERNELCAT_WGMMA_WEIGHTS_TYPES(256, 128, 128, 129, 130, 131, 132, 133)
// clang-format on

#undef KERNELCAT_WGMMA_WEIGHTS
#undef KERNELCAT_WGMMA_WEIGHTS_TYPES

}  // namespace kernelcat

// Hopper's warpgroup matrix instruction for float8_e4m3fn (sm_90a): 64 x N x 32, both operands in
// shared memory. A row of 128 elements has 128 bytes, so swizzled_rows_descriptor() describes it.
#pragma once

#include <kernelcat/wgmma.cuh>

namespace kernelcat {

constexpr int kWgmmaFp8K = 32;

// WgmmaE4m3<N>::multiply: d = a @ b^T (+ d if kAccumulate), a 64 x 32, b N x 32, d 64 x N float32.
// Threads hold d as in Wgmma.
template <int N>
struct WgmmaE4m3;

// clang-format off
// COUNT is N / 2; A, B and P are the numbers of the operands a, b and kAccumulate.
#define KERNELCAT_WGMMA_E4M3(N, COUNT, A, B, P)                                                  \
  template <>                                                                                    \
  struct WgmmaE4m3<N> {                                                                          \
    template <bool kAccumulate>                                                                  \
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], uint64_t a, uint64_t b) { \
      asm volatile(                                                                              \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                       \
          "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {"                           \
          KERNELCAT_REGISTERS_##COUNT "}, %" #A ", %" #B ", p, 1, 1;\n}\n"                       \
          : KERNELCAT_OUTPUTS_##COUNT                                                            \
          : "l"(a), "l"(b), "n"(static_cast<int>(kAccumulate)));                                 \
    }                                                                                            \
  };

KERNELCAT_WGMMA_E4M3(16, 8, 8, 9, 10)
KERNELCAT_WGMMA_E4M3(32, 16, 16, 17, 18)
KERNELCAT_WGMMA_E4M3(64, 32, 32, 33, 34)
KERNELCAT_WGMMA_E4M3(96, 48, 48, 49, 50)
KERNELCAT_WGMMA_E4M3(128, 64, 64, 65, 66)
KERNELCAT_WGMMA_E4M3(160, 80, 80, 81, 82)
KERNELCAT_WGMMA_E4M3(192, 96, 96, 97, 98)
// clang-format on

#undef KERNELCAT_WGMMA_E4M3

}  // namespace kernelcat

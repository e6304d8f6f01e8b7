// Hopper's warpgroup matrix instruction (sm_90a) with weights in registers.
#pragma once

#include <kernelcat/wgmma.cuh>

namespace kernelcat {

// Keeps the compiler from writing operands while wgmma may still read them.
template <int kCount>
__device__ __forceinline__ void pin_operand(uint32_t (&words)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(words[i])::"memory");
}

// WgmmaWeights<T, N>::multiply: d = a @ b^T (+ d if `accumulate`), a 64 x 16 in registers (as
// mma.sync has them, each warp its 16 rows), b N x 16 in shared memory, d 64 x N float32 as Wgmma
// leaves it.
template <typename T, int N>
struct WgmmaWeights;

// clang-format off
#define KERNELCAT_F8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define KERNELCAT_F32(i) \
  KERNELCAT_F8(i), KERNELCAT_F8(i + 8), KERNELCAT_F8(i + 16), KERNELCAT_F8(i + 24)
#define KERNELCAT_TEN(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, " \
  "%" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define KERNELCAT_30 KERNELCAT_TEN() ", " KERNELCAT_TEN(1) ", " KERNELCAT_TEN(2)
#define KERNELCAT_60 \
  KERNELCAT_30 ", " KERNELCAT_TEN(3) ", " KERNELCAT_TEN(4) ", " KERNELCAT_TEN(5)
#define KERNELCAT_90 \
  KERNELCAT_60 ", " KERNELCAT_TEN(6) ", " KERNELCAT_TEN(7) ", " KERNELCAT_TEN(8)
#define KERNELCAT_120 \
  KERNELCAT_90 ", " KERNELCAT_TEN(9) ", " KERNELCAT_TEN(10) ", " KERNELCAT_TEN(11)

#define KERNELCAT_LIST(...) __VA_ARGS__
#define KERNELCAT_WGMMA_WEIGHTS(TYPE, NAME, N, REGISTERS, OPERANDS, A, B, P)                    \
  template <>                                                                                  \
  struct WgmmaWeights<TYPE, N> {                                                               \
    static __device__ __forceinline__ void multiply(float (&d)[N / 2], const uint32_t (&a)[4], \
                                                    uint64_t b, bool accumulate) {             \
      asm volatile(                                                                            \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                     \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" REGISTERS       \
          "}, {" A "}, %" #B ", p, 1, 1, 0;\n}\n"                                              \
          : OPERANDS                                                                           \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                                \
            "r"(static_cast<int>(accumulate)));                                                \
    }                                                                                          \
  };
#define KERNELCAT_WGMMA_WEIGHTS_TYPES(N, REGISTERS, OPERANDS, A, B, P)                         \
  KERNELCAT_WGMMA_WEIGHTS(bfloat16, "bf16", N, REGISTERS, KERNELCAT_LIST(OPERANDS), A, B, P)   \
  KERNELCAT_WGMMA_WEIGHTS(float16, "f16", N, REGISTERS, KERNELCAT_LIST(OPERANDS), A, B, P)

KERNELCAT_WGMMA_WEIGHTS_TYPES(64, KERNELCAT_30 ", %30, %31", KERNELCAT_LIST(KERNELCAT_F32(0)),
                              "%32, %33, %34, %35", 36, 37)
KERNELCAT_WGMMA_WEIGHTS_TYPES(128, KERNELCAT_60 ", %60, %61, %62, %63",
                              KERNELCAT_LIST(KERNELCAT_F32(0), KERNELCAT_F32(32)),
                              "%64, %65, %66, %67", 68, 69)
KERNELCAT_WGMMA_WEIGHTS_TYPES(192, KERNELCAT_90 ", %90, %91, %92, %93, %94, %95",
                              KERNELCAT_LIST(KERNELCAT_F32(0), KERNELCAT_F32(32),
                                             KERNELCAT_F32(64)),
                              "%96, %97, %98, %99", 100, 101)
KERNELCAT_WGMMA_WEIGHTS_TYPES(256, KERNELCAT_120
                              ", %120, %121, %122, %123, %124, %125, %126, %127",
                              KERNELCAT_LIST(KERNELCAT_F32(0), KERNELCAT_F32(32),
                                             KERNELCAT_F32(64), KERNELCAT_F32(96)),
                              "%128, %129, %130, %131", 132, 133)
// clang-format on

#undef KERNELCAT_F8
#undef KERNELCAT_F32
#undef KERNELCAT_TEN
#undef KERNELCAT_30
#undef KERNELCAT_60
#undef KERNELCAT_90
#undef KERNELCAT_120
#undef KERNELCAT_LIST
#undef KERNELCAT_WGMMA_WEIGHTS
#undef KERNELCAT_WGMMA_WEIGHTS_TYPES

}  // namespace kernelcat

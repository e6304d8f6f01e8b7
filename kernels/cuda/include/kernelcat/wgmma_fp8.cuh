// Hopper's warpgroup matrix instruction for float8_e4m3fn: 64 x N x 32, both operands in shared
// memory. Rows of 128 elements are rows of 128 bytes, so swizzled_rows_descriptor serves as is.
#pragma once

#include <kernelcat/wgmma.cuh>

namespace kernelcat {

constexpr int kWgmmaFp8K = 32;

// WgmmaE4m3<N>::multiply: d = a @ b^T (+ d if kAccumulate), a 64 x 32, b N x 32, d 64 x N float32.
// Threads hold d as in Wgmma.
template <int N>
struct WgmmaE4m3;

// clang-format off
#define KERNELCAT_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KERNELCAT_D8(i) KERNELCAT_D4(i), KERNELCAT_D4(i + 4)
#define KERNELCAT_D16(i) KERNELCAT_D8(i), KERNELCAT_D8(i + 8)
#define KERNELCAT_D32(i) KERNELCAT_D16(i), KERNELCAT_D16(i + 16)
#define KERNELCAT_D64(i) KERNELCAT_D32(i), KERNELCAT_D32(i + 32)

// Operands %t0 to %t9; t is empty for the first ten.
#define KERNELCAT_TEN(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, " \
  "%" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define KERNELCAT_30 KERNELCAT_TEN() ", " KERNELCAT_TEN(1) ", " KERNELCAT_TEN(2)
#define KERNELCAT_60 \
  KERNELCAT_30 ", " KERNELCAT_TEN(3) ", " KERNELCAT_TEN(4) ", " KERNELCAT_TEN(5)
#define KERNELCAT_80 KERNELCAT_60 ", " KERNELCAT_TEN(6) ", " KERNELCAT_TEN(7)

#define KERNELCAT_WGMMA_E4M3(N, COUNT, REGISTERS, OPERANDS, A, B, P)                              \
  template <>                                                                                    \
  struct WgmmaE4m3<N> {                                                                          \
    template <bool kAccumulate>                                                                  \
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], uint64_t a, uint64_t b) { \
      asm volatile(                                                                              \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                       \
          "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS                 \
          "}, %" #A ", %" #B ", p, 1, 1;\n}\n"                                                   \
          : OPERANDS                                                                             \
          : "l"(a), "l"(b), "n"(static_cast<int>(kAccumulate)));                                 \
    }                                                                                            \
  };
#define KERNELCAT_OPERANDS(...) __VA_ARGS__

KERNELCAT_WGMMA_E4M3(16, 8, "%0, %1, %2, %3, %4, %5, %6, %7",
                     KERNELCAT_OPERANDS(KERNELCAT_D8(0)), 8, 9, 10)
KERNELCAT_WGMMA_E4M3(32, 16, KERNELCAT_TEN() ", %10, %11, %12, %13, %14, %15",
                     KERNELCAT_OPERANDS(KERNELCAT_D16(0)), 16, 17, 18)
KERNELCAT_WGMMA_E4M3(64, 32, KERNELCAT_30 ", %30, %31",
                     KERNELCAT_OPERANDS(KERNELCAT_D32(0)), 32, 33, 34)
KERNELCAT_WGMMA_E4M3(96, 48, KERNELCAT_30 ", " KERNELCAT_TEN(3)
                     ", %40, %41, %42, %43, %44, %45, %46, %47",
                     KERNELCAT_OPERANDS(KERNELCAT_D32(0), KERNELCAT_D16(32)), 48, 49, 50)
KERNELCAT_WGMMA_E4M3(128, 64, KERNELCAT_60 ", %60, %61, %62, %63",
                     KERNELCAT_OPERANDS(KERNELCAT_D64(0)), 64, 65, 66)
KERNELCAT_WGMMA_E4M3(160, 80, KERNELCAT_80,
                     KERNELCAT_OPERANDS(KERNELCAT_D64(0), KERNELCAT_D16(64)), 80, 81, 82)
KERNELCAT_WGMMA_E4M3(192, 96, KERNELCAT_80 ", " KERNELCAT_TEN(8)
                     ", %90, %91, %92, %93, %94, %95",
                     KERNELCAT_OPERANDS(KERNELCAT_D64(0), KERNELCAT_D32(64)), 96, 97, 98)
// clang-format on

#undef KERNELCAT_D4
#undef KERNELCAT_D8
#undef KERNELCAT_D16
#undef KERNELCAT_D32
#undef KERNELCAT_D64
#undef KERNELCAT_TEN
#undef KERNELCAT_30
#undef KERNELCAT_60
#undef KERNELCAT_80
#undef KERNELCAT_WGMMA_E4M3
#undef KERNELCAT_OPERANDS

}  // namespace kernelcat

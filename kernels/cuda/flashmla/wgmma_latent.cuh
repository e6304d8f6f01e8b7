// Two more forms of Hopper's warpgroup matrix instruction: scores whose queries are in registers,
// and weights in shared memory times values that are stored row after row of k.
#pragma once

#include "../paged_attn/wgmma_values.cuh"

namespace kernelcat {

// WgmmaQueries<T>::multiply: d = a @ b^T (+ d if `accumulate`), a 64 x 16 in registers (as mma.sync
// has them, each warp its 16 rows), b 64 x 16 in shared memory, d 64 x 64 float32 as Wgmma leaves
// it.
template <typename T>
struct WgmmaQueries;

// WgmmaWeights<T>::multiply: d += a @ b, a 64 x 16 and b 16 x 256 in shared memory, d 64 x 256
// float32 as Wgmma leaves it.
template <typename T>
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
#define KERNELCAT_120 \
  KERNELCAT_30 ", " KERNELCAT_TEN(3) ", " KERNELCAT_TEN(4) ", " KERNELCAT_TEN(5) ", " \
  KERNELCAT_TEN(6) ", " KERNELCAT_TEN(7) ", " KERNELCAT_TEN(8) ", " \
  KERNELCAT_TEN(9) ", " KERNELCAT_TEN(10) ", " KERNELCAT_TEN(11)

#define KERNELCAT_WGMMA_LATENT(TYPE, NAME)                                                      \
  template <>                                                                                  \
  struct WgmmaQueries<TYPE> {                                                                  \
    static __device__ __forceinline__ void multiply(float (&d)[32], const uint32_t (&a)[4],    \
                                                    uint64_t b, bool accumulate) {             \
      asm volatile(                                                                            \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                         \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {"                     \
          KERNELCAT_30 ", %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"              \
          : KERNELCAT_F32(0)                                                                   \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                                \
            "r"(static_cast<int>(accumulate)));                                                \
    }                                                                                          \
  };                                                                                           \
  template <>                                                                                  \
  struct WgmmaWeights<TYPE> {                                                                  \
    static __device__ __forceinline__ void multiply(float (&d)[128], uint64_t a, uint64_t b) { \
      asm volatile(                                                                            \
          "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                           \
          "wgmma.mma_async.sync.aligned.m64n256k16.f32." NAME "." NAME " {"                    \
          KERNELCAT_120 ", %120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, "      \
          "p, 1, 1, 0, 1;\n}\n"                                                                \
          : KERNELCAT_F32(0), KERNELCAT_F32(32), KERNELCAT_F32(64), KERNELCAT_F32(96)          \
          : "l"(a), "l"(b));                                                                   \
    }                                                                                          \
  };
KERNELCAT_WGMMA_LATENT(bfloat16, "bf16")
KERNELCAT_WGMMA_LATENT(float16, "f16")
// clang-format on

#undef KERNELCAT_F8
#undef KERNELCAT_F32
#undef KERNELCAT_TEN
#undef KERNELCAT_30
#undef KERNELCAT_120
#undef KERNELCAT_WGMMA_LATENT

}  // namespace kernelcat

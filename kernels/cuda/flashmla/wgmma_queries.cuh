// Hopper's warpgroup matrix instruction for scores whose queries are in registers.
#pragma once

#include "../paged_attn/wgmma_values.cuh"

namespace kernelcat {

// WgmmaQueries<T>::multiply: d = a @ b^T (+ d if `accumulate`), a 64 x 16 in registers (as mma.sync
// has them, each warp its 16 rows), b 64 x 16 in shared memory, d 64 x 64 float32 as Wgmma leaves
// it.
template <typename T>
struct WgmmaQueries;

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

#define KERNELCAT_WGMMA_QUERIES(TYPE, NAME)                                                     \
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
  };
KERNELCAT_WGMMA_QUERIES(bfloat16, "bf16")
KERNELCAT_WGMMA_QUERIES(float16, "f16")
// clang-format on

#undef KERNELCAT_F8
#undef KERNELCAT_F32
#undef KERNELCAT_TEN
#undef KERNELCAT_30
#undef KERNELCAT_WGMMA_QUERIES

}  // namespace kernelcat

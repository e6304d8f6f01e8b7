// Hopper's warpgroup matrix instruction with its first operand in registers (sm_90a): 64 x N x 16.
#pragma once

#include <kernelcat/wgmma.cuh>

namespace kernelcat {

// Matrix descriptor of a second operand whose rows are k: 16 tokens x N columns of values. They lie
// as chunks of 64 columns, `chunk_bytes` apart; a chunk's rows have 128 bytes in the 128-byte
// swizzle, and eight of them are one atom of 1024 bytes.
__device__ __forceinline__ uint64_t swizzled_values_descriptor(uint32_t shared_address,
                                                               uint32_t chunk_bytes) {
  constexpr uint64_t kTokenStride = 1024 / 16, kSwizzle128 = 1;
  return (shared_address & 0x3FFFF) >> 4 | static_cast<uint64_t>(chunk_bytes / 16) << 16 |
         kTokenStride << 32 | kSwizzle128 << 62;
}

// How the second operand lies in shared memory: rows of N that are contiguous in k, as
// swizzled_rows_descriptor describes them, or rows of k (swizzled_values_descriptor).
enum class OperandB { kRowsOfN, kRowsOfK };

// WgmmaRs<T, N, kLayout>::multiply: d = a @ b (+ d if `accumulate`), a 64 x 16 in registers (each
// warp its 16 rows, in mma.sync's layout), b 16 x N in shared memory, d 64 x N float32 in the
// layout of Wgmma.
template <typename T, int N, OperandB kLayout>
struct WgmmaRs;

// clang-format off
// A0 to A3 and B are the numbers of a's words and of b's descriptor among the operands, P that of
// `accumulate`; COUNT is the number of d's registers.
#define KERNELCAT_WGMMA_RS(TYPE, NAME, N, LAYOUT, TRANSPOSED, COUNT, A0, A1, A2, A3, B, P)        \
  template <>                                                                                    \
  struct WgmmaRs<TYPE, N, OperandB::LAYOUT> {                                                    \
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], const uint32_t (&a)[4],   \
                                                    uint64_t b, bool accumulate) {               \
      asm volatile(                                                                              \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                       \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {"                   \
          KERNELCAT_REGISTERS_##COUNT "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B        \
          ", p, 1, 1, " #TRANSPOSED ";\n}\n"                                                     \
          : KERNELCAT_OUTPUTS_##COUNT                                                            \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                                  \
            "r"(static_cast<int>(accumulate)));                                                  \
    }                                                                                            \
  };
#define KERNELCAT_WGMMA_RS_TYPES(N, LAYOUT, TRANSPOSED, COUNT, A0, A1, A2, A3, B, P)               \
  KERNELCAT_WGMMA_RS(bfloat16, "bf16", N, LAYOUT, TRANSPOSED, COUNT, A0, A1, A2, A3, B, P)         \
  KERNELCAT_WGMMA_RS(float16, "f16", N, LAYOUT, TRANSPOSED, COUNT, A0, A1, A2, A3, B, P)

KERNELCAT_WGMMA_RS_TYPES(16, kRowsOfN, 0, 8, 8, 9, 10, 11, 12, 13)
KERNELCAT_WGMMA_RS_TYPES(32, kRowsOfN, 0, 16, 16, 17, 18, 19, 20, 21)
KERNELCAT_WGMMA_RS_TYPES(48, kRowsOfN, 0, 24, 24, 25, 26, 27, 28, 29)
KERNELCAT_WGMMA_RS_TYPES(64, kRowsOfN, 0, 32, 32, 33, 34, 35, 36, 37)
KERNELCAT_WGMMA_RS_TYPES(80, kRowsOfN, 0, 40, 40, 41, 42, 43, 44, 45)
KERNELCAT_WGMMA_RS_TYPES(96, kRowsOfN, 0, 48, 48, 49, 50, 51, 52, 53)
KERNELCAT_WGMMA_RS_TYPES(112, kRowsOfN, 0, 56, 56, 57, 58, 59, 60, 61)
KERNELCAT_WGMMA_RS_TYPES(128, kRowsOfN, 0, 64, 64, 65, 66, 67, 68, 69)
KERNELCAT_WGMMA_RS_TYPES(144, kRowsOfN, 0, 72, 72, 73, 74, 75, 76, 77)
KERNELCAT_WGMMA_RS_TYPES(160, kRowsOfN, 0, 80, 80, 81, 82, 83, 84, 85)
KERNELCAT_WGMMA_RS_TYPES(176, kRowsOfN, 0, 88, 88, 89, 90, 91, 92, 93)
KERNELCAT_WGMMA_RS_TYPES(192, kRowsOfN, 0, 96, 96, 97, 98, 99, 100, 101)
KERNELCAT_WGMMA_RS_TYPES(208, kRowsOfN, 0, 104, 104, 105, 106, 107, 108, 109)
KERNELCAT_WGMMA_RS_TYPES(224, kRowsOfN, 0, 112, 112, 113, 114, 115, 116, 117)
KERNELCAT_WGMMA_RS_TYPES(256, kRowsOfN, 0, 128, 128, 129, 130, 131, 132, 133)
KERNELCAT_WGMMA_RS_TYPES(64, kRowsOfK, 1, 32, 32, 33, 34, 35, 36, 37)
KERNELCAT_WGMMA_RS_TYPES(128, kRowsOfK, 1, 64, 64, 65, 66, 67, 68, 69)
KERNELCAT_WGMMA_RS_TYPES(256, kRowsOfK, 1, 128, 128, 129, 130, 131, 132, 133)
// clang-format on

#undef KERNELCAT_WGMMA_RS
#undef KERNELCAT_WGMMA_RS_TYPES

}  // namespace kernelcat

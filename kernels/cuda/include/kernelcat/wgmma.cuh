// Hopper's warpgroup matrix instruction (sm_90a): 64 x N x 16, both operands in shared memory.
#pragma once

#include <kernelcat/types.cuh>
#include <kernelcat/wgmma_registers.cuh>

namespace kernelcat {

constexpr int kWgmmaM = 64;
constexpr int kWgmmaK = 16;
constexpr int kRowBytes = 128;  // of an operand in shared memory: one row of the swizzle

// The matrix descriptor of K-major rows of 128 bytes in the 128-byte swizzle, as a tensor map with
// a box of 64 16-bit columns lays them out. Eight rows are an atom of 1024 bytes, to which
// `shared_address` must be aligned; plus 0, 32, 64 or 96 bytes to begin at column 0, 16, 32 or 48:
// the hardware applies the swizzle to addresses, so inside an atom a descriptor moves by addition.
//   bits 0-13 address / 16; 16-29 leading offset / 16 (not used here); 32-45 stride between atoms
//   / 16; 49-51 base offset (0); 62-63 layout (1: 128-byte swizzle)
__device__ __forceinline__ uint64_t swizzled_rows_descriptor(uint32_t shared_address) {
  constexpr uint64_t kLeadingOffset = 1, kAtomStride = 1024 / 16, kSwizzle128 = 1;
  return (shared_address & 0x3FFFF) >> 4 | kLeadingOffset << 16 | kAtomStride << 32 |
         kSwizzle128 << 62;
}

// The matrix descriptor of an operand that begins `num_bytes` further on. The addition never
// carries out of the address field, because shared memory ends below 2^18.
__device__ __forceinline__ uint64_t advanced(uint64_t descriptor, uint32_t num_bytes) {
  return descriptor + (num_bytes >> 4);
}

// Before the first wgmma of a group: orders accesses to registers and earlier ones to shared
// memory.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Returns once all but the latest kPending groups of wgmmas have completed.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving or copying registers while wgmma uses them: accumulators, or an
// operand in registers.
template <int kCount>
__device__ __forceinline__ void pin(float (&accumulators)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&operand)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(operand[i])::"memory");
}
template <typename T, int kRows, int kCount>
__device__ __forceinline__ void pin(T (&registers)[kRows][kCount]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) pin(registers[i]);
}

// Wgmma<T, N>::multiply: d = a @ b^T (+ d if `accumulate`), a 64 x 16, b N x 16, d 64 x N float32.
// Thread t of the warpgroup holds, in d[4 * j ...], columns 8 * j + 2 * (t % 4) + {0, 1} of row
// 16 * (t / 32) + t % 32 / 4, then of the row 8 below.
template <typename T, int N>
struct Wgmma;

// clang-format off
// COUNT is N / 2; A, B and P are the numbers of the operands a, b and `accumulate`.
#define KERNELCAT_WGMMA(TYPE, NAME, N, COUNT, A, B, P)                                         \
  template <>                                                                                  \
  struct Wgmma<TYPE, N> {                                                                      \
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], uint64_t a, uint64_t b, \
                                                    bool accumulate) {                         \
      asm volatile(                                                                            \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                     \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {"                 \
          KERNELCAT_REGISTERS_##COUNT "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}\n"               \
          : KERNELCAT_OUTPUTS_##COUNT                                                          \
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                \
    }                                                                                          \
  };
#define KERNELCAT_WGMMA_TYPES(N, COUNT, A, B, P)       \
  KERNELCAT_WGMMA(bfloat16, "bf16", N, COUNT, A, B, P) \
  KERNELCAT_WGMMA(float16, "f16", N, COUNT, A, B, P)

KERNELCAT_WGMMA_TYPES(16, 8, 8, 9, 10)
KERNELCAT_WGMMA_TYPES(24, 12, 12, 13, 14)
KERNELCAT_WGMMA_TYPES(32, 16, 16, 17, 18)
KERNELCAT_WGMMA_TYPES(40, 20, 20, 21, 22)
KERNELCAT_WGMMA_TYPES(48, 24, 24, 25, 26)
KERNELCAT_WGMMA_TYPES(56, 28, 28, 29, 30)
KERNELCAT_WGMMA_TYPES(64, 32, 32, 33, 34)
KERNELCAT_WGMMA_TYPES(72, 36, 36, 37, 38)
KERNELCAT_WGMMA_TYPES(80, 40, 40, 41, 42)
KERNELCAT_WGMMA_TYPES(88, 44, 44, 45, 46)
KERNELCAT_WGMMA_TYPES(96, 48, 48, 49, 50)
KERNELCAT_WGMMA_TYPES(104, 52, 52, 53, 54)
KERNELCAT_WGMMA_TYPES(112, 56, 56, 57, 58)
KERNELCAT_WGMMA_TYPES(120, 60, 60, 61, 62)
KERNELCAT_WGMMA_TYPES(128, 64, 64, 65, 66)
KERNELCAT_WGMMA_TYPES(136, 68, 68, 69, 70)
KERNELCAT_WGMMA_TYPES(144, 72, 72, 73, 74)
KERNELCAT_WGMMA_TYPES(152, 76, 76, 77, 78)
KERNELCAT_WGMMA_TYPES(160, 80, 80, 81, 82)
KERNELCAT_WGMMA_TYPES(168, 84, 84, 85, 86)
KERNELCAT_WGMMA_TYPES(176, 88, 88, 89, 90)
KERNELCAT_WGMMA_TYPES(184, 92, 92, 93, 94)
KERNELCAT_WGMMA_TYPES(192, 96, 96, 97, 98)
KERNELCAT_WGMMA_TYPES(200, 100, 100, 101, 102)
KERNELCAT_WGMMA_TYPES(208, 104, 104, 105, 106)
KERNELCAT_WGMMA_TYPES(216, 108, 108, 109, 110)
KERNELCAT_WGMMA_TYPES(224, 112, 112, 113, 114)
KERNELCAT_WGMMA_TYPES(256, 128, 128, 129, 130)
// clang-format on

#undef KERNELCAT_WGMMA
#undef KERNELCAT_WGMMA_TYPES

}  // namespace kernelcat

// Hopper's warpgroup matrix instruction (sm_90a): 64 x N x 16, both operands in shared memory.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

constexpr int kWgmmaM = 64;
constexpr int kWgmmaK = 16;
constexpr int kRowBytes = 128;  // of an operand in shared memory: one row of the swizzle

// Describes K-major rows of 128 bytes in the 128-byte swizzle, as a tensor map with a box of 64
// 16-bit columns lays them out: 8 rows are one atom of 1024 bytes, to which `shared_address` must
// be aligned (plus 0, 32, 64 or 96 bytes to begin at column 0, 16, 32 or 48: the hardware applies
// the swizzle to addresses, so inside an atom a descriptor moves by plain addition).
//   bits 0-13 address / 16; 16-29 leading offset / 16 (not used here); 32-45 stride between atoms
//   / 16; 49-51 base offset (0); 62-63 layout (1: 128-byte swizzle)
__device__ __forceinline__ uint64_t swizzled_rows_descriptor(uint32_t shared_address) {
  constexpr uint64_t kLeadingOffset = 1, kAtomStride = 1024 / 16, kSwizzle128 = 1;
  return (shared_address & 0x3FFFF) >> 4 | kLeadingOffset << 16 | kAtomStride << 32 |
         kSwizzle128 << 62;
}

// A descriptor `num_bytes` further on; no carry leaves the address field, for shared memory ends
// below 2^18.
__device__ __forceinline__ uint64_t advanced(uint64_t descriptor, uint32_t num_bytes) {
  return descriptor + (num_bytes >> 4);
}

// Before the first wgmma of a group: orders registers and earlier accesses to shared memory.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving or copying accumulators while wgmma owns them.
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Wgmma<T, N>::multiply: d = a @ b^T (+ d if `accumulate`), a 64 x 16, b N x 16, d 64 x N float32.
// Thread t of the warpgroup holds, in d[4 * j ...], columns 8 * j + 2 * (t % 4) + {0, 1} of row
// 16 * (t / 32) + t % 32 / 4, then of the row 8 below.
template <typename T, int N>
struct Wgmma;

// clang-format off
#define KERNELCAT_F8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define KERNELCAT_F16(i) KERNELCAT_F8(i), KERNELCAT_F8(i + 8)
#define KERNELCAT_F32(i) KERNELCAT_F16(i), KERNELCAT_F16(i + 16)
#define KERNELCAT_F64(i) KERNELCAT_F32(i), KERNELCAT_F32(i + 32)

#define KERNELCAT_REGISTERS_8 \
  "%0, %1, %2, %3, %4, %5, %6, %7 "
#define KERNELCAT_REGISTERS_16 \
  KERNELCAT_REGISTERS_8 ", " \
  "%8, %9, %10, %11, %12, %13, %14, %15 "
#define KERNELCAT_REGISTERS_24 \
  KERNELCAT_REGISTERS_16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23 "
#define KERNELCAT_REGISTERS_32 \
  KERNELCAT_REGISTERS_24 ", " \
  "%24, %25, %26, %27, %28, %29, %30, %31 "
#define KERNELCAT_REGISTERS_48 \
  KERNELCAT_REGISTERS_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47 "
#define KERNELCAT_REGISTERS_64 \
  KERNELCAT_REGISTERS_48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63 "
#define KERNELCAT_REGISTERS_80 \
  KERNELCAT_REGISTERS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79 "
#define KERNELCAT_REGISTERS_96 \
  KERNELCAT_REGISTERS_80 ", " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95 "
#define KERNELCAT_REGISTERS_112 \
  KERNELCAT_REGISTERS_96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111 "
#define KERNELCAT_REGISTERS_128 \
  KERNELCAT_REGISTERS_112 ", " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127 "

#define KERNELCAT_WGMMA(TYPE, NAME, N, COUNT, REGISTERS, A, B, P)                               \
  template <>                                                                                  \
  struct Wgmma<TYPE, N> {                                                                      \
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], uint64_t a, uint64_t b, \
                                                    bool accumulate) {                         \
      asm volatile(                                                                            \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                     \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {"                 \
          KERNELCAT_REGISTERS_##COUNT "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}\n"               \
          : REGISTERS                                                                          \
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                \
    }                                                                                          \
  };
#define KERNELCAT_WGMMA_TYPES(N, COUNT, A, B, P, ...)                        \
  KERNELCAT_WGMMA(bfloat16, "bf16", N, COUNT, KERNELCAT_LIST(__VA_ARGS__), A, B, P) \
  KERNELCAT_WGMMA(float16, "f16", N, COUNT, KERNELCAT_LIST(__VA_ARGS__), A, B, P)
#define KERNELCAT_LIST(...) __VA_ARGS__

KERNELCAT_WGMMA_TYPES(16, 8, 8, 9, 10, KERNELCAT_F8(0))
KERNELCAT_WGMMA_TYPES(32, 16, 16, 17, 18, KERNELCAT_F16(0))
KERNELCAT_WGMMA_TYPES(48, 24, 24, 25, 26, KERNELCAT_F16(0), KERNELCAT_F8(16))
KERNELCAT_WGMMA_TYPES(64, 32, 32, 33, 34, KERNELCAT_F32(0))
KERNELCAT_WGMMA_TYPES(96, 48, 48, 49, 50, KERNELCAT_F32(0), KERNELCAT_F16(32))
KERNELCAT_WGMMA_TYPES(128, 64, 64, 65, 66, KERNELCAT_F64(0))
KERNELCAT_WGMMA_TYPES(160, 80, 80, 81, 82, KERNELCAT_F64(0), KERNELCAT_F16(64))
KERNELCAT_WGMMA_TYPES(192, 96, 96, 97, 98, KERNELCAT_F64(0), KERNELCAT_F32(64))
KERNELCAT_WGMMA_TYPES(224, 112, 112, 113, 114, KERNELCAT_F64(0), KERNELCAT_F32(64),
                      KERNELCAT_F16(96))
KERNELCAT_WGMMA_TYPES(256, 128, 128, 129, 130, KERNELCAT_F64(0), KERNELCAT_F64(64))
// clang-format on

#undef KERNELCAT_F8
#undef KERNELCAT_F16
#undef KERNELCAT_F32
#undef KERNELCAT_F64
#undef KERNELCAT_WGMMA
#undef KERNELCAT_WGMMA_TYPES
#undef KERNELCAT_LIST

}  // namespace kernelcat

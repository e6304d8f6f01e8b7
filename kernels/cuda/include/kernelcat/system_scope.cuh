// Loads and stores that other GPUs of the host see: release, acquire, and words that carry a flag.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// What this thread, and by a barrier its thread block, wrote and read before comes before the
// value.
__device__ __forceinline__ void store_release_system(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// Eight bytes of data with a flag beside each half. Memory keeps the 8 bytes of data and flag
// together, so data is right where its flag is, without any other order (the idea of NCCL's
// protocol LL).
struct alignas(16) FlaggedWord {
  uint32_t low, low_flag, high, high_flag;
};

__device__ __forceinline__ void store_flagged(FlaggedWord* address, uint2 data, uint32_t flag) {
  const uint64_t flag_bits = static_cast<uint64_t>(flag) << 32;
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address),
               "l"(flag_bits | data.x), "l"(flag_bits | data.y)
               : "memory");
}

// One half of a flagged word, 0 or 1: the other is another thread's.
__device__ __forceinline__ void store_flagged_half(FlaggedWord* address, int half, uint32_t data,
                                                   uint32_t flag) {
  asm volatile(
      "st.relaxed.sys.global.u64 [%0], %1;" ::"l"(reinterpret_cast<uint64_t*>(address) + half),
      "l"(static_cast<uint64_t>(flag) << 32 | data)
      : "memory");
}

__device__ __forceinline__ FlaggedWord load_flagged(const FlaggedWord* address) {
  uint64_t low, high;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(low), "=l"(high)
               : "l"(address)
               : "memory");
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
          static_cast<uint32_t>(high >> 32)};
}

// Four words, each of which arrives whole; in no order.
__device__ __forceinline__ void store_words(uint4* address, const uint4& words) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

__device__ __forceinline__ uint4 load_words(const uint4* address) {
  uint4 words;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(address)
               : "memory");
  return words;
}

__device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}

}  // namespace kernelcat

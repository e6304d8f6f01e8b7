// What a kernel with a programmatic launch may do before grid_dependency_wait(): read words that
// the kernel before it may still write, as hints, and bring memory into L2.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// A word that may be written at the same time: its value is a hint and may be anything. It stays
// out of L1, so an ordinary load after grid_dependency_wait() gets what was written.
__device__ __forceinline__ int load_hint(const int* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Asks for `num_bytes` by a single request (sm_90+), and does not wait. Address and size are
// multiples of 16, and all of the memory must exist. L2 is where all SMs meet: later loads get
// what is written in the meantime.
__device__ __forceinline__ void prefetch_span_l2(const void* address, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(num_bytes)
               : "memory");
}

}  // namespace kernelcat

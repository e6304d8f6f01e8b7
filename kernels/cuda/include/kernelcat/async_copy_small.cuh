// Copies of 4 to 16 bytes from global to shared memory, through L1, that a thread does not wait for
// (sm_80+).
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// Both addresses are multiples of kBytes; zeros are written where `valid` is false, and nothing is
// read.
template <int kBytes>
__device__ __forceinline__ void async_copy_small(uint32_t shared_address, const void* global,
                                                 bool valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address), "l"(global),
               "n"(kBytes), "r"(valid ? kBytes : 0)
               : "memory");
}

}  // namespace kernelcat

// 16-byte copies from global to shared memory that a thread does not wait for (sm_80+).
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// Both addresses are multiples of 16; zeros are written where `valid` is false, and nothing is
// read.
__device__ __forceinline__ void async_copy_16(uint32_t shared_address, const void* global,
                                              bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void commit_async_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns once all but the latest `kPending` groups of this thread's copies have completed.
template <int kPending>
__device__ __forceinline__ void wait_async_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace kernelcat

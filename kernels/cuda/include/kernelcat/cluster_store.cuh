// Ordinary stores into the shared memory of another thread block of the cluster; a cluster barrier
// makes the stores visible.
#pragma once

#include <kernelcat/cluster.cuh>

namespace kernelcat {

// Writes a word to where `shared` lies in thread block `cta` of the cluster.
__device__ __forceinline__ void store_word(void* shared, uint32_t word, uint32_t cta) {
  asm volatile(
      "st.shared::cluster.u32 [%0], %1;" ::"r"(remote_address(shared_address(shared), cta)),
      "r"(word)
      : "memory");
}

}  // namespace kernelcat

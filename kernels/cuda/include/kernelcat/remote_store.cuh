// Stores from registers into the shared memory of another thread block of the cluster.
#pragma once

#include <kernelcat/cluster.cuh>

namespace kernelcat {

// Writes 16 bytes to where `shared` lies in thread block `cta` of the cluster, and completes them
// on that thread block's copy of `barrier`.
template <typename Vector>
__device__ __forceinline__ void store_remote(Vector* shared, const Vector& value, Barrier& barrier,
                                             uint32_t cta) {
  static_assert(sizeof(Vector) == 16);
  const uint4 words = __builtin_bit_cast(uint4, value);
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
      " [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote_address(shared_address(shared), cta)),
      "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w),
      "r"(remote_address(shared_address(&barrier), cta))
      : "memory");
}

}  // namespace kernelcat

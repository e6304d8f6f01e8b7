// Stores into another block's shared memory that signal its barrier as they land (sm_90+).
#pragma once

#include <kernelcat/cluster.cuh>

namespace kernelcat {

// To where `shared` lies here, in block `cta` of the cluster; 16 bytes of that block's `barrier`.
__device__ __forceinline__ void store_remote(float4* shared, const float4& value, Barrier& barrier,
                                             uint32_t cta) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(remote_address(shared_address(shared), cta)),
      "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(__float_as_uint(value.z)),
      "r"(__float_as_uint(value.w)), "r"(remote_address(shared_address(&barrier), cta))
      : "memory");
}

}  // namespace kernelcat

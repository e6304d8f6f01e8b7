// tensor_load (bulk_copy.cuh) and tensor_load_multicast (cluster.cuh) for boxes of three and four
// dimensions.
#pragma once

#include <kernelcat/bulk_copy.cuh>
#include <kernelcat/cache_policy.cuh>

namespace kernelcat {

__device__ __forceinline__ void tensor_load_3d(void* shared, const TensorMap& map, int x, int y,
                                               int z, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(&barrier)), "l"(kDefaultPolicy)
      : "memory");
}

// Loads into every thread block of the cluster whose bit is set in `mask`, at the same address, and
// completes on each one's copy of `barrier`.
__device__ __forceinline__ void tensor_load_multicast_3d(void* shared, const TensorMap& map, int x,
                                                         int y, int z, Barrier& barrier,
                                                         uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(&barrier)), "h"(mask),
      "l"(kDefaultPolicy)
      : "memory");
}

__device__ __forceinline__ void tensor_load_4d(void* shared, const TensorMap& map, int x, int y,
                                               int z, int w, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(&barrier)), "l"(kDefaultPolicy)
      : "memory");
}

}  // namespace kernelcat

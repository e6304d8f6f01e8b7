// Thread block clusters (sm_90+): blocks that run together, and reach into each other's shared
// memory. A block must not exit while a peer may still signal or write into it.
#pragma once

#include <kernelcat/bulk_copy.cuh>

namespace kernelcat {

// This block's rank in its cluster: x runs fastest, as in blockIdx.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Arrives and goes on; what was written before is visible to all threads after cluster_wait().
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

// Without ordering memory, which costs a fence of the whole GPU: enough after fence_barrier_init().
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// All threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// Where what lies at `shared_address` here lies in block `cta` of the cluster.
__device__ __forceinline__ uint32_t remote_address(uint32_t shared_address, uint32_t cta) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared_address), "r"(cta));
  return address;
}

// Makes what this thread wrote visible to the blocks of the cluster that see a later signal of it.
__device__ __forceinline__ void fence_cluster() {
  asm volatile("fence.acq_rel.cluster;" ::: "memory");
}

// One arrival at block `cta`'s copy of `barrier`; `cta` may be this block. Says "I am done
// reading", all that a consumer has to say; to hand over what was written, call fence_cluster()
// before. (The instruction's own .release.cluster would fence the whole GPU at every arrival.)
__device__ __forceinline__ void arrive_remote(Barrier& barrier, uint32_t cta) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
                   remote_address(shared_address(&barrier), cta))
               : "memory");
}

// tensor_load into every block of the cluster whose bit is set in `mask`, and completing on its
// barrier: both lie where they lie here.
__device__ __forceinline__ void tensor_load_multicast(void* shared, const TensorMap& map, int x,
                                                      int y, Barrier& barrier, uint16_t mask,
                                                      uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(&barrier)), "h"(mask), "l"(policy)
      : "memory");
}

// Copies `num_bytes` (a multiple of 16) of this block's shared memory to the same place in block
// `cta`, completing on that block's copy of `barrier`.
__device__ __forceinline__ void bulk_copy_to_peer(const void* shared, uint32_t num_bytes,
                                                  Barrier& barrier, uint32_t cta) {
  const uint32_t source = shared_address(shared);
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];" ::"r"(remote_address(source, cta)),
      "r"(source), "r"(num_bytes), "r"(remote_address(shared_address(&barrier), cta))
      : "memory");
}

}  // namespace kernelcat

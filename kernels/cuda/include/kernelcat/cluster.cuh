// Thread block clusters (sm_90+): thread blocks that run at the same time and can access each
// other's shared memory. A thread block must not exit while a peer may still write into its shared
// memory or arrive at its barriers.
#pragma once

#include <kernelcat/bulk_copy.cuh>

namespace kernelcat {

// This thread block's rank in its cluster: x runs fastest, as in blockIdx.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Arrives without waiting; what was written before is visible to all threads after cluster_wait().
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

// cluster_arrive() without ordering memory, which costs a fence of the whole GPU. Sufficient after
// fence_barrier_init().
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// A barrier of all threads of all thread blocks of the cluster.
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// The address, in thread block `cta` of the cluster, of what `shared_address` is in this one.
__device__ __forceinline__ uint32_t remote_address(uint32_t shared_address, uint32_t cta) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(shared_address), "r"(cta));
  return address;
}

// Makes what this thread wrote visible to a thread block of the cluster that observes a later
// arrival of this thread.
__device__ __forceinline__ void fence_cluster() {
  asm volatile("fence.acq_rel.cluster;" ::: "memory");
}

// One arrival at thread block `cta`'s copy of `barrier`; `cta` may be this thread block. The
// arrival does not order writes, which is enough to release a stage that was only read; to make
// writes visible, call fence_cluster() before. (The instruction's .release.cluster would fence the
// whole GPU at every arrival.)
__device__ __forceinline__ void arrive_remote(Barrier& barrier, uint32_t cta) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
                   remote_address(shared_address(&barrier), cta))
               : "memory");
}

// tensor_load into every thread block of the cluster whose bit is set in `mask`, at the address
// `shared` there, completing on that thread block's copy of `barrier`.
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

// Copies `num_bytes` (a multiple of 16) of this thread block's shared memory to the same address in
// thread block `cta`, completing on that thread block's copy of `barrier`.
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

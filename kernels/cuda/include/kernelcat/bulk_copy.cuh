// TMA (sm_90+): copies of 1-D spans and of 2-D boxes of tensor maps between global and shared
// memory.
#pragma once

#include <kernelcat/mbarrier.cuh>

namespace kernelcat {

// The 128 opaque bytes of a CUtensorMap; a kernel takes it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// L2 eviction priorities, as an operand of the copy instructions.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// `num_bytes`, and both addresses, must be multiples of 16.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t num_bytes,
                                          Barrier& barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(num_bytes), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t num_bytes,
                                           uint64_t policy) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
          global),
      "r"(shared_address(shared)), "r"(num_bytes), "l"(policy)
      : "memory");
}

// A box whose first element has inner coordinate `x` and outer coordinate `y`. What lies outside
// the tensor is zero in shared memory, counts among the barrier's bytes, and is never stored.
__device__ __forceinline__ void tensor_load(void* shared, const TensorMap& map, int x, int y,
                                            Barrier& barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tensor_store(const TensorMap& map, const void* shared, int x, int y,
                                             uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint"
      " [%0, {%1, %2}], [%3], %4;" ::"l"(&map),
      "r"(x), "r"(y), "r"(shared_address(shared)), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Returns once all but the latest `kPending` groups of this thread's stores have read shared
// memory.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Where the hardware puts the 16-byte unit at `offset` of a box with rows of `kSpan` bytes (32, 64
// or 128): bits 4.. are XORed with bits 7.., so that a column of units falls into distinct banks.
template <int kSpan>
__host__ __device__ constexpr uint32_t swizzled(uint32_t offset) {
  return offset ^ ((offset >> 3) & ((kSpan / 16 - 1) << 4));
}

}  // namespace kernelcat

// Warp roles, named barriers, register reallocation, and the fence between proxies.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

__device__ __forceinline__ int lane_index() {
  return threadIdx.x % kWarpThreads;
}

// By a shuffle, from which the compiler infers that the index is the same in the whole warp; all 32
// lanes must call it together.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(0xffffffff, threadIdx.x / kWarpThreads, 0);
}

// True in exactly one lane; all 32 lanes must call it together.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// Named barriers 1 to 15; barrier 0 is that of __syncthreads().
__device__ __forceinline__ void named_barrier_sync(int barrier, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Makes this thread's ordinary writes to shared memory visible to the copy engine and to wgmma.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace kernelcat

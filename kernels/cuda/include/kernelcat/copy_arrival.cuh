// The arrival of a thread's asynchronous copies at an mbarrier.
#pragma once

#include <kernelcat/mbarrier.cuh>

namespace kernelcat {

// One arrival, which happens when this thread's earlier asynchronous copies have landed.
__device__ __forceinline__ void arrive_when_copied(Barrier& barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier))
      : "memory");
}

}  // namespace kernelcat

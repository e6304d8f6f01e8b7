// Prefetches into L2. Unlike a load into registers, a prefetch is safe before
// grid_dependency_wait(): a later load still gets what an earlier kernel writes in the meantime.
#pragma once

namespace kernelcat {

__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace kernelcat

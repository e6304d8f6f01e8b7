// Programmatic dependent launch (sm_90+): a kernel starts while the kernel before it still runs.
#pragma once

namespace kernelcat {

// Returns once the kernels before this one have ended and their writes are visible. A kernel with a
// programmatic launch must call this before it accesses global memory; in other kernels the call
// has no effect.
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next kernel's thread blocks start once every thread block of this kernel has called this
// or ended.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace kernelcat

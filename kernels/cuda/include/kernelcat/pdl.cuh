// Programmatic dependent launch (sm_90+): a kernel begins while the one before it still runs.
#pragma once

namespace kernelcat {

// Returns once the kernels before this one have ended and their writes are visible. A kernel that
// is launched so must call it before it touches global memory; otherwise it does nothing.
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next kernel's blocks start once every block of this one has called it or ended.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace kernelcat

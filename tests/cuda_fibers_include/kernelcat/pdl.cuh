// kernels/cuda/include/kernelcat/pdl.cuh on the host.
#pragma once

namespace kernelcat {

inline void grid_dependency_wait() {}
inline void launch_dependents() {}

}  // namespace kernelcat

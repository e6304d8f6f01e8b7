// kernels/cuda/include/kernelcat/atomic_add.cuh on the host.
#pragma once

namespace kernelcat {

inline void atomic_add(float* address, float4 four) {
  address[0] += four.x;
  address[1] += four.y;
  address[2] += four.z;
  address[3] += four.w;
}

}  // namespace kernelcat

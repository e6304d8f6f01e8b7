// Additions to global memory without a result (sm_90).
#pragma once

namespace kernelcat {

// Adds four values to four floats, from a multiple of 16 bytes on.
__device__ __forceinline__ void atomic_add(float* address, float4 four) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w)
               : "memory");
}

}  // namespace kernelcat

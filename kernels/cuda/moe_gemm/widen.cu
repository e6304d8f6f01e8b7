// Float8 activations as 16-bit elements, exactly.
#include <kernelcat/fp8.cuh>
#include <kernelcat/pdl.cuh>

namespace kernelcat {

constexpr int kVector = 8;  // columns of a thread

// Thread block (x, y) widens columns from 8 * blockDim.x * y on of row x. k is a multiple of 8.
template <typename T>
__global__ void __launch_bounds__(128) moe_gemm_widen(const float8_e4m3fn* a,  // (rows, k)
                                                      T* out,                  // (rows, k)
                                                      int k) {
  grid_dependency_wait();
  const int col = (blockIdx.y * blockDim.x + threadIdx.x) * kVector;
  if (col >= k) return;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * k + col;
  const uint2 eight = *reinterpret_cast<const uint2*>(a + first);
  const auto* elements = reinterpret_cast<const float8_e4m3fn*>(&eight);
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = pack<T>(to_float(elements[2 * i]), to_float(elements[2 * i + 1]));
  }
  *reinterpret_cast<uint4*>(out + first) = {pairs[0], pairs[1], pairs[2], pairs[3]};
}

}  // namespace kernelcat

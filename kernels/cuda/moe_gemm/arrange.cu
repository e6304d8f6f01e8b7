// Activations with their columns in the order in which float8 weights are decoded.
#include <kernelcat/float8_tile.cuh>
#include <kernelcat/pdl.cuh>

namespace kernelcat {

constexpr int kVector = 8;  // columns of a thread

// Thread block (x, y) writes columns from 8 * blockDim.x * y on of row x. k is a multiple of 16,
// and pitch is k rounded up to a multiple of 64: the columns in between are zeros.
template <typename T>
__global__ void __launch_bounds__(128) moe_gemm_arrange(const T* a,  // (rows, k)
                                                        T* out,      // (rows, pitch)
                                                        int k, int pitch) {
  grid_dependency_wait();
  const int first = (blockIdx.y * blockDim.x + threadIdx.x) * kVector;
  if (first >= pitch) return;
  const int64_t row = blockIdx.x;
  const int tile = first / kTileCols * kTileCols;
  // A vector has columns 0 and 2, or 1 and 3, of four groups of four.
  const int is_odd = first / kVector % 2;
  uint32_t pairs[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const int col = tile + float8_column(first - tile + 2 * i) - is_odd;
    uint2 four = {0, 0};
    if (col < k) four = *reinterpret_cast<const uint2*>(a + row * k + col);
    pairs[i] = __byte_perm(four.x, four.y, is_odd ? 0x7632 : 0x5410);
  }
  *reinterpret_cast<uint4*>(out + row * pitch + first) = {pairs[0], pairs[1], pairs[2], pairs[3]};
}

}  // namespace kernelcat

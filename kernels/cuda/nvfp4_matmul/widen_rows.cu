// Converts A from float8 to bfloat16, which represents every float8 value: the type in which tensor
// cores multiply A by decoded weights.
#include <kernelcat/fp8.cuh>
#include <kernelcat/pdl.cuh>

namespace kernelcat {

// A thread converts 16 elements at a time, from 16 to 32 bytes.
__global__ void __launch_bounds__(256)
    nvfp4_matmul_widen_rows(const float8_e4m3fn* a,  // (m, k)
                            uint4* wide,             // (m, k / 8) vectors of bfloat16
                            int64_t num_vectors) {
  grid_dependency_wait();
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < num_vectors;
       i += step) {
    const uint4 vector = reinterpret_cast<const uint4*>(a)[i];
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(&vector);
    const float8_e4m3fn* values = reinterpret_cast<const float8_e4m3fn*>(bytes);
    uint32_t words[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      words[j] = pack<bfloat16>(to_float(values[2 * j]), to_float(values[2 * j + 1]));
    }
    wide[2 * i] = {words[0], words[1], words[2], words[3]};
    wide[2 * i + 1] = {words[4], words[5], words[6], words[7]};
  }
  launch_dependents();
}

}  // namespace kernelcat

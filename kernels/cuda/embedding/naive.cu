// One thread for each element of out.
#include <kernelcat/types.cuh>

namespace kernelcat {

template <typename T, typename Id>
__global__ void __launch_bounds__(256)
    embedding_naive(const Id* ids,   // (tokens,)
                    const T* table,  // (vocab, hidden)
                    T* out,          // (tokens, hidden)
                    int64_t tokens, int64_t vocab, int hidden, float scale) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < tokens * hidden; i += step) {
    const int64_t id = ids[i / hidden];
    const bool is_inside = id >= 0 && id < vocab;
    out[i] = from_float<T>(scale * (is_inside ? to_float(table[id * hidden + i % hidden]) : 0.0f));
  }
}

}  // namespace kernelcat

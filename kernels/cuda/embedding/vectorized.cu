// Vectors of 16 bytes, several a thread. Neighbouring threads take neighbouring vectors of out, so
// that rows of any length fill the thread blocks.
#include <kernelcat/pdl.cuh>
#include <kernelcat/types.cuh>

namespace kernelcat {

constexpr int kVector = 8;  // elements in 16 bytes

template <typename T>
__device__ __forceinline__ uint4 scaled(const uint4& vector, float scale) {
  const T* elements = reinterpret_cast<const T*>(&vector);
  uint32_t pairs[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    pairs[i] = pack<T>(scale * to_float(elements[2 * i]), scale * to_float(elements[2 * i + 1]));
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

template <typename T, typename Id, int kThreads, int kUnroll, bool kDependentLaunch>
__global__ void __launch_bounds__(kThreads)
    embedding_vectorized(const Id* ids,   // (tokens,)
                         const T* table,  // (vocab, hidden)
                         T* out,          // (tokens, hidden)
                         int64_t tokens, int64_t vocab, int hidden, float scale) {
  const int row_vectors = hidden / kVector;
  const int64_t num_vectors = tokens * row_vectors;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  if constexpr (kDependentLaunch) {
    grid_dependency_wait();
    launch_dependents();
  }
  uint4 vectors[kUnroll] = {};
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t idx = first + i * kThreads;
    if (idx >= num_vectors) continue;
    const int64_t id = ids[idx / row_vectors];
    if (id < 0 || id >= vocab) continue;
    vectors[i] =
        __ldg(reinterpret_cast<const uint4*>(table) + id * row_vectors + idx % row_vectors);
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t idx = first + i * kThreads;
    if (idx < num_vectors) reinterpret_cast<uint4*>(out)[idx] = scaled<T>(vectors[i], scale);
  }
}

}  // namespace kernelcat

// One cluster of thread blocks for each row (sm_90+). Each thread block copies its part of the
// logits to shared memory once; all passes read the copy, and reductions go through distributed
// shared memory.
#include <kernelcat/pdl.cuh>
#include <kernelcat/team.cuh>

#include "arguments.cuh"

namespace kernelcat {

constexpr int kResidentThreads = 768;  // of an SM: 80 registers each
constexpr int kUnroll = 4;             // vectors of eight logits that a thread has in flight

// A thread block's part of a row, in shared memory. A thread reads only what it wrote.
template <typename S, int kThreads>
struct SharedTokens {
  Eight<S>* values;
  int first, count;  // in units of eight tokens

  static __device__ __forceinline__ float rounded(float x) { return rounded_to<S>(x); }

  template <typename T>
  __device__ __forceinline__ void copy(const LogitsRow<T>& row) const {
    for (int begin = threadIdx.x; begin < count; begin += kThreads * kUnroll) {
      Eight<T> loaded[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int eight = begin + i * kThreads;
        if (eight < count) loaded[i] = row.load(first + eight);
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int eight = begin + i * kThreads;
        if (eight >= count) continue;
        EightLogits x;
        row.penalize(x, loaded[i], first + eight);
        Eight<S> stored;
#pragma unroll
        for (int j = 0; j < kEight; ++j) stored.values[j] = from_float<S>(x[j]);
        values[eight] = stored;
      }
    }
  }

  template <typename Function>
  __device__ __forceinline__ void for_each(Function function) const {
    for (int eight = threadIdx.x; eight < count; eight += kThreads) {
      const Eight<S> stored = values[eight];
      EightLogits x;
#pragma unroll
      for (int i = 0; i < kEight; ++i) x[i] = to_float(stored.values[i]);
      function((first + eight) * kEight, x);
    }
  }
};

// S is the type of logits in shared memory: T, or float where a penalty changes them.
template <typename T, typename S, bool kDraws, bool kFilters, int kThreads, int kClusterSize>
__global__ void __launch_bounds__(kThreads, kResidentThreads / kThreads)
    sample_cluster(const T* logits,           // (rows, vocab)
                   const float* temperature,  // (rows,), like seed and offset null without a draw
                   const uint2* seed,         // (rows,) int64
                   const uint2* offset,       // (rows,) int64
                   const float* min_p,        // (rows,), like top_k and top_p null without filters
                   const int* top_k,          // (rows,)
                   const float* top_p,        // (rows,)
                   const uint32_t* seen,      // (rows, ceil(vocab / 32)), null without penalty
                   const float* penalty,      // (rows,), null without penalty
                   int* ids,                  // (rows,)
                   float* logprobs,           // (rows,) or null
                   int vocab) {
  extern __shared__ uint4 dynamic_shared[];
  __shared__ TeamMemory<kThreads / kWarpThreads, kClusterSize> memory;
  const Arguments<T> arguments{logits, temperature, seed,    offset, min_p,    top_k,
                               top_p,  seen,        penalty, ids,    logprobs, vocab};
  Team<kThreads, kClusterSize> team{memory};
  const int64_t row = blockIdx.x / kClusterSize;
  const int rank = blockIdx.x % kClusterSize;
  const int64_t num_eights = ceil_div(vocab, kEight);
  const int begin = static_cast<int>(num_eights * rank / kClusterSize);
  const int end = static_cast<int>(num_eights * (rank + 1) / kClusterSize);
  if constexpr (kClusterSize > 1) cluster_arrive_relaxed();

  grid_dependency_wait();
  const RowParameters parameters = arguments.parameters(row);
  const SharedTokens<S, kThreads> tokens{reinterpret_cast<Eight<S>*>(dynamic_shared), begin,
                                         end - begin};
  tokens.copy(arguments.row(row));
  launch_dependents();
  if constexpr (kClusterSize > 1) cluster_wait();  // all thread blocks have started
  const Chosen chosen = choose<kDraws, kFilters>(tokens, team, parameters, logprobs != nullptr);
  if (rank == 0 && threadIdx.x == 0) arguments.store(row, chosen);
}

}  // namespace kernelcat

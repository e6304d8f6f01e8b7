// One thread block for each row, which reads the logits again in every pass.
#include <kernelcat/team.cuh>

#include "arguments.cuh"

namespace kernelcat {

constexpr int kThreads = 512;

template <typename T>
struct GlobalTokens {
  LogitsRow<T> row;

  static __device__ __forceinline__ float rounded(float x) { return x; }

  template <typename Function>
  __device__ __forceinline__ void for_each(Function function) const {
    for (int eight = threadIdx.x; eight < ceil_div(row.vocab, kEight); eight += kThreads) {
      EightLogits x;
      row.penalize(x, row.load(eight), eight);
      function(eight * kEight, x);
    }
  }
};

template <typename T, bool kDraws, bool kFilters>
__global__ void __launch_bounds__(kThreads, 1)
    sample_naive(const T* logits,           // (rows, vocab)
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
  const Arguments<T> arguments{logits, temperature, seed,    offset, min_p,    top_k,
                               top_p,  seen,        penalty, ids,    logprobs, vocab};
  __shared__ TeamMemory<kThreads / kWarpThreads, 1> memory;
  Team<kThreads, 1> team{memory};
  const GlobalTokens<T> tokens{arguments.row(blockIdx.x)};
  const Chosen chosen = choose<kDraws, kFilters>(tokens, team, arguments.parameters(blockIdx.x),
                                                 arguments.logprobs != nullptr);
  if (threadIdx.x == 0) arguments.store(blockIdx.x, chosen);
}

}  // namespace kernelcat

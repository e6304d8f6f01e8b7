// All logits, one warp for each; then a search for one token after the other.
#include <kernelcat/float32.cuh>
#include <kernelcat/team.cuh>
#include <kernelcat/token_order.cuh>
#include <kernelcat/warp_sum.cuh>

namespace kernelcat {

constexpr int kThreads = 256;

template <typename T, typename Logit>
__global__ void __launch_bounds__(kThreads)
    lm_head_scores(const T* x,     // (tokens, hidden)
                   const T* w,     // (vocab, hidden)
                   float* scores,  // (tokens, vocab)
                   Logit* logits,  // (tokens, vocab) or null
                   int tokens, int vocab, int hidden) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / kWarpThreads);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarpThreads);
  for (int64_t i = first + threadIdx.x / kWarpThreads; i < int64_t{tokens} * vocab; i += step) {
    const T* x_row = x + i / vocab * hidden;
    const T* w_row = w + i % vocab * hidden;
    float sum = 0.0f;
    for (int k = lane_index(); k < hidden; k += kWarpThreads) {
      sum += to_float(x_row[k]) * to_float(w_row[k]);
    }
    sum = warp_sum(sum);
    if (lane_index() != 0) continue;
    scores[i] = sum;
    if (logits != nullptr) logits[i] = from_float<Logit>(sum);
  }
}

// One thread block for each row of scores. Each round finds the first token after the last one.
__global__ void __launch_bounds__(kThreads) lm_head_first(const float* scores,  // (tokens, vocab)
                                                          float* values,        // (tokens, top_k)
                                                          int* ids,             // (tokens, top_k)
                                                          int vocab, int top_k) {
  __shared__ TeamMemory<kThreads / kWarpThreads, 1> memory;
  Team<kThreads, 1> team{memory};
  const float* row = scores + static_cast<int64_t>(blockIdx.x) * vocab;
  ScoredToken last{kInfinity, -1};
  for (int rank = 0; rank < top_k; ++rank) {
    ScoredToken best;
    for (int id = threadIdx.x; id < vocab; id += kThreads) {
      const ScoredToken token{row[id], id};
      if (last.precedes(token)) best.merge(token);
    }
    last = team.reduce(best);
    if (threadIdx.x == 0) {
      values[static_cast<int64_t>(blockIdx.x) * top_k + rank] = last.score;
      ids[static_cast<int64_t>(blockIdx.x) * top_k + rank] = last.id;
    }
  }
}

}  // namespace kernelcat

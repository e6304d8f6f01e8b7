// The largest logits of few rows of x in one launch: rows of w stream once through a ring in shared
// memory, mma.sync multiplies them by x, which lies in registers, and each warp keeps lists of the
// first tokens of the logits that it adds up. The last thread block merges all lists.
#include <kernelcat/float32.cuh>
#include <kernelcat/streamed_product.cuh>

#include "list_merge.cuh"

namespace kernelcat {

// Takes the logits of a warp's pairs into its lists.
template <typename Logit, int kLists>
struct ListedLogits {
  static constexpr bool kWholeWarps = true;
  struct Extra {};

  TopList (&lists)[kLists];
  Logit* logits;  // (tokens, vocab) or null
  int tokens, vocab, top_k;

  __device__ __forceinline__ void prepare() const {}
  __device__ __forceinline__ Extra load(int, int) const { return {}; }

  __device__ __forceinline__ void store(const Extra&, int row, int token, float2 z) const {
    const float scores[] = {z.x, z.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool is_logit = token < tokens && row + i < vocab;
      if (is_logit && logits != nullptr) {
        logits[static_cast<int64_t>(token) * vocab + row + i] = from_float<Logit>(scores[i]);
      }
#pragma unroll
      for (int t = 0; t < kLists; ++t) {
        if (t >= tokens) break;
        ScoredToken candidate;
        if (is_logit && token == t) candidate = {scores[i], row + i};
        lists[t].offer(candidate, top_k);
      }
    }
  }
};

template <typename T, typename Logit, int kLists, int kTokens, int kGroups, int kNumWarps,
          int kChunks, int kNumStages>
__global__ void __launch_bounds__((kNumWarps + 2) * kWarpThreads, 1)
    lm_head_streamed(const T* x,          // (tokens, hidden)
                     const T* w,          // (vocab, hidden)
                     float* values,       // (tokens, top_k)
                     int* ids,            // (tokens, top_k)
                     Logit* logits,       // (tokens, vocab) or null
                     ScoredToken* found,  // (thread blocks, kLists, kMaxTopK)
                     uint32_t* counter,   // zero
                     int tokens, int vocab, int hidden, int top_k) {
  using Kind = ProductKind<T, RowNorm::kNone, kTokens, kGroups, kNumWarps, kChunks, kNumStages>;
  using Output = ListedLogits<Logit, kLists>;
  constexpr int kWarps = kNumWarps + 2;
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 127;
  auto& shared =
      *reinterpret_cast<ProductShared<Kind, typename Output::Extra>*>(dynamic_shared + padding);
  TopList lists[kLists];
  const ActivationRows<T> rows = {
      .x = x, .norm_weight = nullptr, .tokens = tokens, .k = hidden, .eps = 0.0f};
  run_streamed_product(shared, GroupRange::of_block(ceil_div(vocab, kGroupRows)), vocab,
                       WeightRows<T>{w, hidden}, rows, Output{lists, logits, tokens, vocab, top_k});

  // The ring is empty: all that was copied has been multiplied.
  struct Merging {
    ScoredToken lists[kWarps][kLists][kMaxTopK];
    bool is_last;
  };
  static_assert(sizeof(Merging) <= sizeof(shared));
  auto& merging = reinterpret_cast<Merging&>(shared);
  merge_warps<kWarps, kLists>(lists, merging.lists, found + blockIdx.x * (kLists * kMaxTopK),
                              tokens, top_k);
  if (!arrive_last(counter, merging.is_last)) return;
  for (int token = threadIdx.x / kWarpThreads; token < tokens; token += kWarps) {
    const TopList list = merge_blocks<kLists>(found + token * kMaxTopK, top_k);
    const int rank = lane_index();
    if (rank >= top_k) continue;
    values[token * top_k + rank] = list.token.score;
    ids[token * top_k + rank] = list.token.id;
  }
}

}  // namespace kernelcat

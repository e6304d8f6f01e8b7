// The experts of all ranks' tokens, which ranks send each other as flagged words.
#pragma once

#include <kernelcat/expert_ranks.cuh>
#include <kernelcat/waiting.cuh>

namespace kernelcat {

constexpr int kWordIds = 4;  // ids of 16 bits in a flagged word

// The tokens of one rank and their experts, whose ids fill kIdWords flagged words for each token.
// All ranks have as many.
template <int kIdWords>
struct Tokens {
  const int* expert_ids;  // (tokens, top_k)
  int tokens, top_k, local_experts;

  // The flagged words that a rank sends to each rank.
  __device__ __forceinline__ int num_words() const { return tokens * kIdWords; }

  // Four ids of `token`, from 4 * `part` on, 16 bits each; none is 0xffff.
  __device__ __forceinline__ uint2 packed_ids(int token, int part) const {
    uint32_t ids[kWordIds];
#pragma unroll
    for (int i = 0; i < kWordIds; ++i) {
      const int slot = part * kWordIds + i;
      ids[i] =
          slot < top_k ? expert_ids[static_cast<int64_t>(token) * top_k + slot] & 0xffff : 0xffff;
    }
    return {ids[0] | ids[1] << 16, ids[2] | ids[3] << 16};
  }
};

// Id number i of those that `packed` holds; 0xffff is none.
__device__ __forceinline__ int unpacked_id(const uint2& packed, int i) {
  return (i < 2 ? packed.x : packed.y) >> (i % 2 * 16) & 0xffff;
}

// Sends every rank, this one too, the ids of `count` tokens, number n of which is `token_of(n)`.
// `num_threads` threads share the flagged words; `first` is the number of the caller.
template <int kRanks, int kIdWords, typename TokenOf>
__device__ __forceinline__ void send_ids(const Tokens<kIdWords>& own,
                                         const Windows<kRanks>& windows, uint32_t epoch, int count,
                                         int first, int num_threads, TokenOf token_of) {
  for (int i = first; i < count * kIdWords; i += num_threads) {
    const int token = token_of(i / kIdWords), part = i % kIdWords;
    const uint2 ids = own.packed_ids(token, part);
#pragma unroll
    for (int shift = 1; shift <= kRanks; ++shift) {
      FlaggedWord* words = windows.of[shift % kRanks]->words[epoch % 2][windows.rank];
      store_flagged(&words[token * kIdWords + part], ids, epoch);
    }
  }
}

// The experts of a token.
template <int kIdWords>
struct TokenExperts {
  uint2 ids[kIdWords];

  // Loads ids from `words`; false unless all are of `epoch`.
  __device__ __forceinline__ bool load(const FlaggedWord* words, uint32_t epoch) {
    bool has_come = true;
#pragma unroll
    for (int part = 0; part < kIdWords; ++part) {
      const FlaggedWord word = load_flagged(&words[part]);
      has_come &= word.low_flag == epoch && word.high_flag == epoch;
      ids[part] = {word.low, word.high};
    }
    return has_come;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int part = 0; part < kIdWords; ++part) ids[part] = {~0u, ~0u};
  }

  // Calls `visit(slot, expert)` for each slot. Experts are counted from `first`; the expert is -1
  // where it is not one of `local_experts`.
  template <typename Visit>
  __device__ __forceinline__ void visit(int top_k, int first, int local_experts,
                                        Visit visit) const {
#pragma unroll
    for (int slot = 0; slot < kIdWords * kWordIds; ++slot) {
      if (slot >= top_k) continue;
      const int expert = unpacked_id(ids[slot / kWordIds], slot % kWordIds) - first;
      const bool is_here = 0 <= expert && expert < local_experts;
      visit(slot, is_here ? expert : -1);
    }
  }
};

// The ids of all ranks' tokens, in this rank's window.
template <int kRanks, int kIdWords>
struct SentIds {
  const Tokens<kIdWords>& tokens;
  const Window* own;
  uint32_t epoch;

  // Loads the experts of token number i of all ranks; one that there is not has none. Returns the
  // rank whose ids have not come, or -1.
  __device__ __forceinline__ int load(TokenExperts<kIdWords>& experts, int i) const {
    if (i >= kRanks * tokens.tokens) {
      experts.clear();
      return -1;
    }
    const int source = i / tokens.tokens, word = i % tokens.tokens * kIdWords;
    return experts.load(&own->words[epoch % 2][source][word], epoch) ? -1 : source;
  }

  // The first rank of which ids have not come, or `otherwise`.
  __device__ __forceinline__ int missing_rank(int otherwise) const {
    TokenExperts<kIdWords> experts;
    for (int i = 0; i < kRanks * tokens.tokens; ++i) {
      const int rank = load(experts, i);
      if (rank >= 0) return rank;
    }
    return otherwise;
  }
};

}  // namespace kernelcat

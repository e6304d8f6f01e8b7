// The index maps of the rows that arrive: assignments sorted by expert, as grouped products take
// them. Each thread block finds the assignments of an expert in all ids, in their order; so thread
// blocks need nothing of each other.
#pragma once

#include <kernelcat/block_sum.cuh>

#include "arrivals.cuh"

namespace kernelcat {

struct Maps {
  int* offsets;   // (local_experts + 1,)
  int* order;     // (ranks * tokens * top_k,)
  int* position;  // (ranks * tokens, top_k)
};

// The experts of a token.
template <int kIdWords>
struct TokenExperts {
  uint2 ids[kIdWords];

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

// Waits for the ids of token i of all ranks; a token that there is not has none.
template <int kRanks, int kIdWords>
__device__ __forceinline__ TokenExperts<kIdWords> experts_of_token(const Tokens<kIdWords>& tokens,
                                                                   int i, const Window* own,
                                                                   uint32_t epoch,
                                                                   Waiting& waiting) {
  TokenExperts<kIdWords> found;
#pragma unroll
  for (int part = 0; part < kIdWords; ++part) found.ids[part] = {~0u, ~0u};
  if (i >= kRanks * tokens.tokens) return found;
  const int source = i / tokens.tokens;
  const FlaggedWord* words = &own->words[epoch % 2][source][tokens.word_of(i % tokens.tokens, 0)];
  waiting.until_none([&] {
    int missing = -1;
#pragma unroll
    for (int part = 0; part < kIdWords; ++part) {
      const FlaggedWord word = load_flagged(&words[part]);
      if (word.low_flag != epoch || word.high_flag != epoch) missing = source;
      found.ids[part] = {word.low, word.high};
    }
    return missing;
  });
  return found;
}

// Makes the maps of the experts `index`, `index` + `num_blocks` ...; thread blocks share what
// belongs to no expert. There are at most as many thread blocks as experts.
template <int kRanks, int kThreads, int kIdWords>
__device__ __forceinline__ void make_maps(const Maps& maps, const Tokens<kIdWords>& tokens,
                                          int rank, const Window* own, uint32_t epoch,
                                          Waiting& waiting, int index, int num_blocks,
                                          int2* scratch) {
  const int num_tokens = kRanks * tokens.tokens, top_k = tokens.top_k;
  const int first_expert = rank * tokens.local_experts;
  int num_rows = 0, num_assignments = 0;
  for (int expert = index; expert < tokens.local_experts; expert += num_blocks) {
    TokenExperts<kIdWords> token;
    int2 counts = {0, 0};  // assignments of lower experts, and of all
    for (int i = threadIdx.x; i < num_tokens; i += kThreads) {
      token = experts_of_token<kRanks>(tokens, i, own, epoch, waiting);
      token.visit(top_k, first_expert, tokens.local_experts, [&](int, int other) {
        counts.x += 0 <= other && other < expert;
        counts.y += other >= 0;
      });
    }
    counts = block_pair_sum<kThreads>(counts, scratch).total;
    num_assignments = counts.y;
    if (threadIdx.x == 0) {
      maps.offsets[expert] = counts.x;
      if (expert == tokens.local_experts - 1) maps.offsets[expert + 1] = counts.y;
    }
    int begin = counts.x;
    num_rows = 0;
    for (int base = 0; base < num_tokens; base += kThreads) {
      if (num_tokens > kThreads || base + threadIdx.x >= num_tokens) {
        token = experts_of_token<kRanks>(tokens, base + threadIdx.x, own, epoch, waiting);
      }
      int2 mine = {0, 0};  // rows, and assignments of `expert`
      token.visit(top_k, first_expert, tokens.local_experts, [&](int, int other) {
        mine.x |= other >= 0;
        mine.y += other == expert;
      });
      const PairSum sum = block_pair_sum<kThreads>(mine, scratch);
      const int64_t first = static_cast<int64_t>(num_rows + sum.before.x) * top_k;
      int place = begin + sum.before.y;
      token.visit(top_k, first_expert, tokens.local_experts, [&](int slot, int other) {
        if (other == expert) {
          maps.order[place] = first + slot;
          maps.position[first + slot] = place++;
        } else if (expert == 0 && mine.x && other < 0) {
          maps.position[first + slot] = -1;
        }
      });
      num_rows += sum.total.x;
      begin += sum.total.y;
    }
  }
  const int size = num_tokens * top_k, step = num_blocks * kThreads;
  const int first = index * kThreads + threadIdx.x;
  for (int i = num_assignments + first; i < size; i += step) maps.order[i] = -1;
  for (int i = num_rows * top_k + first; i < size; i += step) maps.position[i] = -1;
}

}  // namespace kernelcat

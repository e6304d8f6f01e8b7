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

  // Loads the experts of token i of all ranks; a token that there is not has none. Returns the rank
  // whose ids have not come, or -1.
  __device__ __forceinline__ int load(TokenExperts<kIdWords>& experts, int i) const {
    experts.clear();
    if (i >= kRanks * tokens.tokens) return -1;
    const int source = i / tokens.tokens, word = tokens.word_of(i % tokens.tokens, 0);
    return experts.load(&own->words[epoch % 2][source][word], epoch) ? -1 : source;
  }
};

// Makes the maps of the experts `index`, `index` + `num_blocks` ...; thread blocks share what
// belongs to no expert. There are at most as many thread blocks as experts.
template <int kRanks, int kThreads, int kIdWords>
__device__ __forceinline__ void make_maps(const Maps& maps, const Tokens<kIdWords>& tokens,
                                          int rank, const Window* own, uint32_t epoch,
                                          Waiting& waiting, int index, int num_blocks,
                                          int2* scratch) {
  const int num_tokens = kRanks * tokens.tokens, top_k = tokens.top_k;
  const int first_expert = rank * tokens.local_experts;
  constexpr int kUnroll = 8 / kIdWords;  // tokens whose ids a thread loads at once
  const SentIds<kRanks, kIdWords> sent{tokens, own, epoch};
  int num_rows = 0, num_assignments = 0;
  for (int expert = index; expert < tokens.local_experts; expert += num_blocks) {
    int2 counts = {0, 0};         // assignments of lower experts, and of all
    TokenExperts<kIdWords> next;  // of this thread's next token in the order of tokens
    next.clear();
    for (int base = 0; base < num_tokens; base += kUnroll * kThreads) {
      TokenExperts<kIdWords> found[kUnroll];
      waiting.until_none([&] {
        int missing = -1;
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          missing = max(missing, sent.load(found[i], base + i * kThreads + threadIdx.x));
        }
        return missing;
      });
      if (base == 0) next = found[0];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        found[i].visit(top_k, first_expert, tokens.local_experts, [&](int, int other) {
          counts.x += 0 <= other && other < expert;
          counts.y += other >= 0;
        });
      }
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
      const TokenExperts<kIdWords> current = next;
      sent.load(next, base + kThreads + threadIdx.x);  // has come already
      int2 mine = {0, 0};                              // rows, and assignments of `expert`
      current.visit(top_k, first_expert, tokens.local_experts, [&](int, int other) {
        mine.x |= other >= 0;
        mine.y += other == expert;
      });
      const PairSum sum = block_pair_sum<kThreads>(mine, scratch);
      const int64_t first = static_cast<int64_t>(num_rows + sum.before.x) * top_k;
      int place = begin + sum.before.y;
      current.visit(top_k, first_expert, tokens.local_experts, [&](int slot, int other) {
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

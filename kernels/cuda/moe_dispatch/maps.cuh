// The index maps of the rows that arrive: assignments sorted by expert, as grouped products take
// them. Each thread block finds the assignments of an expert in all ids, in their order; so thread
// blocks need nothing of each other.
#pragma once

#include <kernelcat/block_sum.cuh>

#include "arrivals.cuh"

namespace kernelcat {

struct Maps {
  int* row_of;          // (ranks, tokens)
  int* source_offsets;  // (ranks + 1,)
  int* offsets;         // (local_experts + 1,)
  int* order;           // (ranks * tokens * top_k,)
  int* position;        // (ranks * tokens, top_k)
};

// The experts of one token that comes.
template <int kIdWords>
struct TokenExperts {
  int row = -1;  // where the token arrives; -1 where it does not come
  uint2 ids[kIdWords];
};

// What a thread block knows about the assignments that arrive.
template <int kRanks, int kIdWords>
struct Assignments {
  const Tokens<kIdWords>& tokens;
  const Arrivals& arrivals;
  const Window* own;
  int rank;
  uint32_t epoch;

  // The experts of token i of all ranks.
  __device__ __forceinline__ TokenExperts<kIdWords> of_token(int i, Waiting& waiting) const {
    TokenExperts<kIdWords> found;
    if (i >= kRanks * tokens.tokens) return found;
    const int source = i / tokens.tokens, token = i % tokens.tokens;
    found.row = arrivals.row(source, token);
    if (found.row < 0) return found;
    const FlaggedWord* words = &own->words[epoch % 2][source][tokens.word_of(token, 0)];
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

  // Calls `visit(assignment, expert)` for the assignments of a token; the expert is -1 where this
  // rank does not hold it.
  template <typename Visit>
  __device__ __forceinline__ void visit(const TokenExperts<kIdWords>& token, Visit visit) const {
    if (token.row < 0) return;
#pragma unroll
    for (int slot = 0; slot < kIdWords * kWordIds; ++slot) {
      if (slot >= tokens.top_k) continue;
      const int id = unpacked_id(token.ids[slot / kWordIds], slot % kWordIds);
      const int expert = id - rank * tokens.local_experts;
      const bool is_here = 0 <= expert && expert < tokens.local_experts;
      visit(token.row * tokens.top_k + slot, is_here ? expert : -1);
    }
  }
};

// Makes the maps of the experts `index`, `index` + `num_blocks` ...; thread blocks share what
// belongs to no expert. There are at most as many thread blocks as experts.
template <int kRanks, int kThreads, int kIdWords>
__device__ __forceinline__ void make_maps(const Maps& maps,
                                          const Assignments<kRanks, kIdWords>& assignments,
                                          Waiting& waiting, int index, int num_blocks,
                                          int* scratch) {
  const Tokens<kIdWords>& tokens = assignments.tokens;
  const Arrivals& arrivals = assignments.arrivals;
  const int num_tokens = kRanks * tokens.tokens, size = num_tokens * tokens.top_k;
  const int thread = threadIdx.x, first = index * kThreads + thread, step = num_blocks * kThreads;
  int num_assignments = 0;
  for (int expert = index; expert < tokens.local_experts; expert += num_blocks) {
    TokenExperts<kIdWords> token;
    int lower = 0, all = 0;
    for (int i = thread; i < num_tokens; i += kThreads) {
      token = assignments.of_token(i, waiting);
      assignments.visit(token, [&](int, int other) {
        all += other >= 0;
        lower += 0 <= other && other < expert;
      });
    }
    int begin = block_sum<kThreads>(lower, scratch).total;
    num_assignments = block_sum<kThreads>(all, scratch).total;
    if (thread == 0) {
      maps.offsets[expert] = begin;
      if (expert == tokens.local_experts - 1) maps.offsets[expert + 1] = num_assignments;
    }
    for (int base = 0; base < num_tokens; base += kThreads) {
      if (num_tokens > kThreads) token = assignments.of_token(base + thread, waiting);
      int count = 0;
      assignments.visit(token, [&](int, int other) { count += other == expert; });
      const BlockSum sum = block_sum<kThreads>(count, scratch);
      int place = begin + sum.before;
      assignments.visit(token, [&](int assignment, int other) {
        if (other == expert) {
          maps.order[place] = assignment;
          maps.position[assignment] = place++;
        } else if (other < 0 && expert == 0) {
          maps.position[assignment] = -1;
        }
      });
      begin += sum.total;
    }
  }
  for (int i = num_assignments + first; i < size; i += step) maps.order[i] = -1;
  for (int i = arrivals.num_rows() * tokens.top_k + first; i < size; i += step) {
    maps.position[i] = -1;
  }
  for (int i = first; i < num_tokens; i += step) {
    maps.row_of[i] = arrivals.row(i / tokens.tokens, i % tokens.tokens);
  }
  for (int i = first; i <= kRanks; i += step) maps.source_offsets[i] = arrivals.first_row(i);
}

}  // namespace kernelcat

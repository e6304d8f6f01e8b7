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

  // Loads the experts of kCount tokens, kThreads apart from `first` on and counted over all ranks;
  // a token that there is not has none. Returns a rank whose ids have not come, or -1.
  template <int kThreads, int kCount>
  __device__ __forceinline__ int load(TokenExperts<kIdWords> (&experts)[kCount], int first) const {
    int missing = -1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) missing = max(missing, load(experts[i], first + i * kThreads));
    return missing;
  }

 private:
  __device__ __forceinline__ int load(TokenExperts<kIdWords>& experts, int i) const {
    experts.clear();
    if (i >= kRanks * tokens.tokens) return -1;
    const int source = i / tokens.tokens, word = tokens.word_of(i % tokens.tokens, 0);
    return experts.load(&own->words[epoch % 2][source][word], epoch) ? -1 : source;
  }
};

// A row for each token that comes, and a place for each assignment of an expert: how many a token
// needs, and how many the tokens before it in its warp need.
struct Needs {
  int rows, places, rows_before, places_before;

  // All threads of a warp call this together; tokens have at most 255 experts.
  __device__ __forceinline__ Needs(int rows, int places) : rows(rows), places(places) {
    const int own = rows | places << 16;
    int end = own;
#pragma unroll
    for (int distance = 1; distance < kWarpThreads; distance *= 2) {
      const int before = __shfl_up_sync(0xffffffff, end, distance);
      if (lane_index() >= distance) end += before;
    }
    rows_before = (end - own) & 0xffff;
    places_before = (end - own) >> 16;
  }
};

// Makes the maps of the experts `index`, `index` + `num_blocks` ...; thread blocks share what
// belongs to no expert. There are at most as many thread blocks as experts. `scratch` is
// shared memory, (kThreads / 32,), and so is `chunks`, (ranks * tokens / 32,): the rows and the
// places before each 32 tokens.
template <int kRanks, int kThreads, int kIdWords>
__device__ __forceinline__ void make_maps(const Maps& maps, const Tokens<kIdWords>& tokens,
                                          int rank, const Window* own, uint32_t epoch,
                                          Waiting& waiting, int index, int num_blocks,
                                          int2* scratch, int2* chunks) {
  const int num_tokens = kRanks * tokens.tokens, top_k = tokens.top_k;
  const int first_expert = rank * tokens.local_experts;
  constexpr int kUnroll = 8 / kIdWords;  // tokens whose ids a thread loads at once
  constexpr int kStep = kUnroll * kThreads;
  const int num_chunks = ceil_div(num_tokens, kWarpThreads);
  const SentIds<kRanks, kIdWords> sent{tokens, own, epoch};
  int num_rows = 0, num_assignments = 0;
  for (int expert = index; expert < tokens.local_experts; expert += num_blocks) {
    if (expert != index) __syncthreads();  // all threads have read `chunks`
    const auto needs_of = [&](const TokenExperts<kIdWords>& experts) {
      int rows = 0, places = 0;
      experts.visit(top_k, first_expert, tokens.local_experts, [&](int, int other) {
        rows |= other >= 0;
        places += other == expert;
      });
      return Needs(rows, places);
    };
    const auto chunk_of = [&](int base, int i) {
      return (base + i * kThreads + int(threadIdx.x)) / kWarpThreads;
    };
    int2 counts = {0, 0};  // assignments of lower experts, and of all
    TokenExperts<kIdWords> found[kUnroll];
    int base = 0;
    for (; base < num_tokens; base += kStep) {
      waiting.until_none([&] { return sent.template load<kThreads>(found, base + threadIdx.x); });
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        found[i].visit(top_k, first_expert, tokens.local_experts, [&](int, int other) {
          counts.x += 0 <= other && other < expert;
          counts.y += other >= 0;
        });
        const Needs needs = needs_of(found[i]);
        if (lane_index() == kWarpThreads - 1 && chunk_of(base, i) < num_chunks) {
          chunks[chunk_of(base, i)] = {needs.rows_before + needs.rows,
                                       needs.places_before + needs.places};
        }
      }
    }
    counts = block_pair_sum<kThreads>(counts, scratch).total;
    num_assignments = counts.y;
    if (threadIdx.x == 0) {
      maps.offsets[expert] = counts.x;
      if (expert == tokens.local_experts - 1) maps.offsets[expert + 1] = counts.y;
    }
    int2 before = {0, counts.x};
    for (int first = 0; first < num_chunks; first += kThreads) {
      const int chunk = first + threadIdx.x;
      const PairSum sum =
          block_pair_sum<kThreads>(chunk < num_chunks ? chunks[chunk] : int2{}, scratch);
      if (chunk < num_chunks) {
        chunks[chunk] = {before.x + sum.before.x, before.y + sum.before.y};
      }
      before = {before.x + sum.total.x, before.y + sum.total.y};
    }
    num_rows = before.x;
    __syncthreads();
    // The last tokens first: their ids are still there.
    const int last = base - kStep;
    for (base = last; base >= 0; base -= kStep) {
      if (base < last) sent.template load<kThreads>(found, base + threadIdx.x);  // all have come
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const Needs needs = needs_of(found[i]);
        if (needs.rows == 0) continue;
        const int2 start = chunks[chunk_of(base, i)];
        const int64_t first = static_cast<int64_t>(start.x + needs.rows_before) * top_k;
        int place = start.y + needs.places_before;
        found[i].visit(top_k, first_expert, tokens.local_experts, [&](int slot, int other) {
          if (other == expert) {
            maps.order[place] = first + slot;
            maps.position[first + slot] = place++;
          } else if (expert == 0 && other < 0) {
            maps.position[first + slot] = -1;
          }
        });
      }
    }
  }
  const int size = num_tokens * top_k, step = num_blocks * kThreads;
  const int first = index * kThreads + threadIdx.x;
  for (int i = num_assignments + first; i < size; i += step) maps.order[i] = -1;
  for (int i = num_rows * top_k + first; i < size; i += step) maps.position[i] = -1;
}

}  // namespace kernelcat

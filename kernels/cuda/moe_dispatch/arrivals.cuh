// Which tokens of all ranks come to this rank, and in which row each arrives.
#pragma once

#include <kernelcat/expert_ranks.cuh>
#include <kernelcat/waiting.cuh>

namespace kernelcat {

constexpr int kGroupTokens = 64;  // tokens of one rank, of which a flagged word tells who comes
constexpr int kWordIds = 4;       // ids of 16 bits in a flagged word

// The tokens of one rank and their experts, whose ids fill kIdWords flagged words for each token.
// All ranks have as many.
template <int kIdWords>
struct Tokens {
  const int* expert_ids;  // (tokens, top_k)
  int tokens, top_k, local_experts;

  __device__ __forceinline__ int num_groups() const { return ceil_div(tokens, kGroupTokens); }
  __device__ __forceinline__ int num_words() const { return word_of(tokens, 0); }

  // Among the flagged words that a rank sends: who comes stands before the ids.
  __device__ __forceinline__ int word_of(int token, int part) const {
    return num_groups() + token * kIdWords + part;
  }

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

// Sends every rank, this one too, which tokens come to it, and the ids of all. A warp takes a group
// of tokens; the launch has `num_blocks` thread blocks for this, `index` is that of the caller.
template <int kRanks, int kThreads, int kIdWords>
__device__ __forceinline__ void send_tokens(const Tokens<kIdWords>& own,
                                            const Windows<kRanks>& windows, uint32_t epoch,
                                            int index, int num_blocks) {
  constexpr int kWarps = kThreads / kWarpThreads, kParts = kGroupTokens / kWarpThreads;
  const int half = epoch % 2, lane = lane_index();
  const int first = index * kWarps + threadIdx.x / kWarpThreads;
  for (int group = first; group < own.num_groups(); group += num_blocks * kWarps) {
    const auto token_of = [&](int part) {
      return group * kGroupTokens + part * kWarpThreads + lane;
    };
    uint2 ids[kParts][kIdWords];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int word = 0; word < kIdWords; ++word) {
        const bool is_token = token_of(part) < own.tokens;
        ids[part][word] = is_token ? own.packed_ids(token_of(part), word) : uint2{~0u, ~0u};
      }
    }
    uint32_t come[kRanks][kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint32_t ranks = 0;
#pragma unroll
      for (int i = 0; i < kIdWords * kWordIds; ++i) {
        const int id = unpacked_id(ids[part][i / kWordIds], i % kWordIds);
        if (id != 0xffff) ranks |= 1u << holder_of<kRanks>(id, own.local_experts);
      }
#pragma unroll
      for (int shift = 0; shift < kRanks; ++shift) {
        come[shift][part] = __ballot_sync(0xffffffff, ranks >> windows.peer(shift) & 1);
      }
    }
#pragma unroll
    for (int i = 1; i <= kRanks; ++i) {
      const int shift = i % kRanks;
      FlaggedWord* words = windows.of[shift]->words[half][windows.rank];
      if (lane == 0) {
        store_flagged(&words[group], {come[shift][0], come[shift][kParts - 1]}, epoch);
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (token_of(part) >= own.tokens) continue;
#pragma unroll
        for (int word = 0; word < kIdWords; ++word) {
          store_flagged(&words[own.word_of(token_of(part), word)], ids[part][word], epoch);
        }
      }
    }
  }
}

// In shared memory, for each group of tokens of each rank.
struct Arrivals {
  uint64_t* who;  // (groups,), a bit for each token that comes
  int* rows;      // (groups + 1,), rows of the groups before
  int num_groups, num_groups_of_rank;

  // Waits for what the ranks send about their tokens. All threads call this together.
  template <int kThreads>
  __device__ __forceinline__ void collect(const Window* own, uint32_t epoch, Waiting& waiting) {
    for (int i = threadIdx.x; i < num_groups; i += kThreads) {
      const int source = i / num_groups_of_rank;
      const FlaggedWord* word = &own->words[epoch % 2][source][i % num_groups_of_rank];
      FlaggedWord found;
      waiting.until_none([&] {
        found = load_flagged(word);
        return found.low_flag == epoch && found.high_flag == epoch ? -1 : source;
      });
      who[i] = static_cast<uint64_t>(found.high) << 32 | found.low;
    }
    __syncthreads();
    if (threadIdx.x < kWarpThreads) sum_up();
    __syncthreads();
  }

  // The row of a token, or -1 where it does not come.
  __device__ __forceinline__ int row(int source, int token) const {
    const int group = source * num_groups_of_rank + token / kGroupTokens;
    const uint64_t earlier = who[group] & ((1ull << token % kGroupTokens) - 1);
    const bool comes = who[group] >> token % kGroupTokens & 1;
    return comes ? rows[group] + __popcll(earlier) : -1;
  }

  // Stores the first row of each rank, and the number of rows: (kRanks + 1,).
  template <int kRanks>
  __device__ __forceinline__ void store_offsets(int* source_offsets) const {
    const int source = threadIdx.x;
    if (source <= kRanks) source_offsets[source] = rows[source * num_groups_of_rank];
  }

 private:
  // One warp makes `rows`.
  __device__ __forceinline__ void sum_up() {
    int total = 0;
    for (int first = 0; first < num_groups; first += kWarpThreads) {
      const int group = first + lane_index();
      const int count = group < num_groups ? __popcll(who[group]) : 0;
      int end = count;
#pragma unroll
      for (int distance = 1; distance < kWarpThreads; distance *= 2) {
        const int before = __shfl_up_sync(0xffffffff, end, distance);
        if (lane_index() >= distance) end += before;
      }
      if (group < num_groups) rows[group] = total + end - count;
      total += __shfl_sync(0xffffffff, end, kWarpThreads - 1);
    }
    if (lane_index() == 0) rows[num_groups] = total;
  }
};

}  // namespace kernelcat

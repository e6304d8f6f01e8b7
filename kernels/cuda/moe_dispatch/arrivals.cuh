// Which tokens of all ranks come to this rank, and in which row each arrives.
#pragma once

#include "sent_ids.cuh"

namespace kernelcat {

constexpr int kGroupTokens = 64;  // tokens of which a flagged word tells who comes

// In the rank's own window: which tokens of all ranks come to it. They are numbered rank by rank,
// and a flagged word has a bit for each of kGroupTokens. Thread blocks that make maps store the
// words, one warp each half of a word.
struct Comers {
  FlaggedWord* words;  // (num_groups,)
  int num_groups;

  template <int kRanks, int kIdWords>
  __device__ __forceinline__ static Comers of(const Tokens<kIdWords>& tokens, Window* own, int rank,
                                              uint32_t epoch) {
    return {own->words[epoch % 2][rank] + tokens.num_words(),
            ceil_div(kRanks * tokens.tokens, kGroupTokens)};
  }

  // Each lane of a warp says whether its token comes; the first lane has token `first`.
  __device__ __forceinline__ void store(int first, bool comes, uint32_t epoch) const {
    const uint32_t bits = __ballot_sync(0xffffffff, comes);
    if (lane_index() > 0 || first >= num_groups * kGroupTokens) return;
    store_flagged_half(&words[first / kGroupTokens], first / kWarpThreads % 2, bits, epoch);
  }
};

// In shared memory, for each group of kGroupTokens tokens of all ranks.
struct Arrivals {
  uint64_t* who;  // (groups,), a bit for each token that comes
  int* rows;      // (groups + 1,), rows of the groups before
  int num_groups, num_tokens;

  // Waits for the words of `comers`, which come when all ids have; `missing_rank()` names a rank
  // whose ids have not. All threads call this together.
  template <int kThreads, typename MissingRank>
  __device__ __forceinline__ void collect(const Comers& comers, uint32_t epoch, Waiting& waiting,
                                          MissingRank missing_rank) {
    for (int i = threadIdx.x; i < num_groups; i += kThreads) {
      FlaggedWord found;
      bool has_come;
      waiting.until(
          [&] {
            found = load_flagged(&comers.words[i]);
            return has_come = found.low_flag == epoch && found.high_flag == epoch;
          },
          missing_rank);
      who[i] = has_come ? static_cast<uint64_t>(found.high) << 32 | found.low : 0;
    }
    __syncthreads();
    if (threadIdx.x < kWarpThreads) sum_up();
    __syncthreads();
  }

  // The row of a token, or -1 where it does not come.
  __device__ __forceinline__ int row(int source, int token) const {
    const int i = source * num_tokens + token, group = i / kGroupTokens;
    const uint64_t bits = who[group], earlier = bits & ((1ull << i % kGroupTokens) - 1);
    const bool comes = bits >> i % kGroupTokens & 1;
    return comes ? rows[group] + __popcll(earlier) : -1;
  }

  // Stores the first row of each rank, and the number of rows: (kRanks + 1,).
  template <int kRanks>
  __device__ __forceinline__ void store_offsets(int* source_offsets) const {
    const int source = threadIdx.x;
    if (source > kRanks) return;
    const int i = source * num_tokens, group = i / kGroupTokens;
    const uint64_t before = (1ull << i % kGroupTokens) - 1;
    source_offsets[source] = rows[group] + (before == 0 ? 0 : __popcll(who[group] & before));
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

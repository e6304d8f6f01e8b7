// Sums travel in tiles through rings, with a signal for each tile. While tiles travel, an earlier
// one is added up.
#pragma once

#include <kernelcat/expert_ranks.cuh>
#include <kernelcat/row_ring_tiles.cuh>

#include "sums.cuh"

namespace kernelcat {

// `shared` is shared memory for the rows and ranks of the thread block's tokens.
template <int kTileTokens, typename T, int kRanks, int kThreads>
__device__ __forceinline__ void combine_in_rings(const ExpertSums<T, kRanks, kThreads>& sums,
                                                 uint8_t* shared) {
  using Sums = ExpertSums<T, kRanks, kThreads>;
  const Windows<kRanks>& windows = sums.windows;
  if (has_failed(windows.of[0])) return;
  const int num_tokens = sums.num_tokens, num_vectors = sums.num_vectors, rank = windows.rank;
  const int num_blocks = gridDim.x, block = blockIdx.x;
  const RowRings rings{static_cast<int>(sums.epoch % 2), kRanks, kTileTokens, num_vectors};
  const int num_tiles = ceil_div(num_tokens, kTileTokens);
  const int count = (num_tiles - block + num_blocks - 1) / num_blocks;
  const auto first_of = [&](int tile) { return (tile * num_blocks + block) * kTileTokens; };
  const auto token_of = [&](int n) {
    return min(first_of(n / kTileTokens) + n % kTileTokens, num_tokens - 1);
  };
  // Of the thread block's tokens: (count * kTileTokens, kRanks), and (count * kTileTokens,).
  int* block_rows = reinterpret_cast<int*>(shared);
  uint8_t* block_ranks = reinterpret_cast<uint8_t*>(block_rows + count * kTileTokens * kRanks);
  for (int i = threadIdx.x; i < count * kTileTokens * kRanks; i += kThreads) {
    block_rows[i] = sums.row_of[i % kRanks * num_tokens + token_of(i / kRanks)];
  }
  find_ranks<kRanks, kThreads>(block_ranks, count * kTileTokens, sums.expert_ids, sums.top_k,
                               sums.local_experts, token_of);
  for (int tile = 0; tile < count + kRowLookahead; ++tile) {
    for (int i = 0; i < kTileTokens && tile < count && first_of(tile) + i < num_tokens; ++i) {
#pragma unroll
      for (int shift = 1; shift < kRanks; ++shift) {
        const int row = block_rows[(tile * kTileTokens + i) * kRanks + windows.peer(shift)];
        if (row < 0) continue;
        uint4* remote = rings.of(windows.of[shift], kRanks - shift, tile, i);
        sums.send_row(row, [&](int at, const uint4& vector) { remote[at] = vector; });
      }
    }
    if (tile < count) send_signals(windows, 0, sums.epoch, tile + 1);
    const int taken = tile - kRowLookahead;
    if (taken < 0) continue;
    if (!wait_for_signals(windows, 0, sums.epoch, taken + 1)) break;
    const int first_token = first_of(taken);
    for (int i = 0; i < kTileTokens && first_token + i < num_tokens; ++i) {
      const int n = taken * kTileTokens + i;
      const uint32_t ranks = block_ranks[n];
      const auto take = [&](uint4(&parts)[Sums::kParts], int first) {
#pragma unroll
        for (int j = 0; j < Sums::kParts; ++j) {
          const int at = first + j / kRanks * kThreads, source = j % kRanks;
          if (source == rank || !(ranks >> source & 1) || at >= num_vectors) continue;
          parts[j] = rings.of(windows.of[0], windows.shift_of(source), taken, i)[at];
        }
      };
      sums.add_up(first_token + i, ranks, block_rows[n * kRanks + rank], take);
    }
  }
}

}  // namespace kernelcat

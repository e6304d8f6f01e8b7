// Rows travel in tiles through rings, with a signal for each tile. While tiles travel, an earlier
// one is taken. A rank's own rows go straight to their place.
#pragma once

#include <kernelcat/expert_ranks.cuh>
#include <kernelcat/move_vectors.cuh>
#include <kernelcat/row_ring_tiles.cuh>

#include "dispatch_rows.cuh"

namespace kernelcat {

template <int kTileTokens, typename T, bool kFloat8, int kRanks, int kThreads, int kIdWords>
__device__ __forceinline__ void move_in_rings(
    DispatchRows<T, kFloat8, kRanks, kThreads, kIdWords>& rows, Waiting& waiting) {
  const Windows<kRanks>& windows = rows.windows;
  if (has_failed(windows.of[0])) return;
  const int num_tokens = rows.tokens.tokens, rank = windows.rank;
  const RowShape<kFloat8>& shape = rows.shape;
  const RowRings rings{static_cast<int>(rows.epoch % 2), kRanks, kTileTokens, shape.num_vectors()};
  const int num_tiles = ceil_div(num_tokens, kTileTokens);
  const int count = (num_tiles - rows.block + rows.num_blocks - 1) / rows.num_blocks;
  const auto first_of = [&](int tile) {
    return (tile * rows.num_blocks + rows.block) * kTileTokens;
  };
  uint8_t* ranks_of = rows.memory.ranks;  // (count * kTileTokens,)
  find_ranks<kRanks, kThreads>(
      ranks_of, count * kTileTokens, rows.tokens.expert_ids, shape.top_k, rows.tokens.local_experts,
      [&](int n) { return min(first_of(n / kTileTokens) + n % kTileTokens, num_tokens - 1); });
  // Rows of a tile go to the peers if it `travels`, and to their own place if it `stays`.
  const auto move_tile = [&](int tile, bool travels, bool stays) {
    const int num_sent = min(kTileTokens, num_tokens - first_of(tile));
    for (int i = 0; i < num_sent; ++i) {
      const uint32_t ranks = ranks_of[tile * kTileTokens + i];
      if (ranks == 0) continue;
      const int token = first_of(tile) + i;
      const int row = stays ? rows.memory.arrivals.row(rank, token) : -1;
      rows.send_row(
          token, [] {},
          [&](int place, const uint4& vector) {
#pragma unroll
            for (int shift = 1; shift < kRanks; ++shift) {
              if (travels && ranks >> windows.peer(shift) & 1) {
                rings.of(windows.of[shift], kRanks - shift, tile, i)[place] = vector;
              }
            }
            if (row >= 0) rows.received.store(shape, row, place, vector);
          });
    }
    if (travels) send_signals(windows, 0, rows.epoch, tile + 1);
  };
  if (count > 0) move_tile(0, true, false);  // while it is found out who comes
  rows.collect_arrivals(waiting);
  for (int tile = 0; tile < count + kRowLookahead; ++tile) {
    if (tile < count) move_tile(tile, tile > 0, true);
    const int taken = tile - kRowLookahead;
    if (taken < 0) continue;
    if (!wait_for_signals(windows, 0, rows.epoch, taken + 1)) break;
    const int first = first_of(taken);
    for (int i = 0; i < kTileTokens && first + i < num_tokens; ++i) {
      for (int source = 0; source < kRanks; ++source) {
        const int row = rows.find_row(source, first + i);
        if (row < 0 || source == rank) continue;
        const uint4* vectors = rings.of(windows.of[0], windows.shift_of(source), taken, i);
        move_vectors<kThreads, kRowUnroll>(
            shape.num_vectors(), [&](int place) { return vectors[place]; },
            [&](int place, const uint4& vector) {
              rows.received.store(shape, row, place, vector);
            });
      }
    }
  }
}

}  // namespace kernelcat

// Rows of 16-byte vectors that ranks send into rings of tiles in each other's windows, a place for
// each token of a tile, with a signal for each tile.
//
// A thread block goes over its tiles in the same order on every rank, and signals a tile that holds
// no row too. It sends tile k and then takes tile k - kRowLookahead: so many tiles travel while it
// works. A ring needs no answer from its reader. Before tile k is sent, the reader's signal for
// tile k - 1 - kRowLookahead has arrived; before that signal the reader has taken the tile that is
// 2 + 2 * kRowLookahead tiles before k.
#pragma once

#include <kernelcat/window.cuh>

namespace kernelcat {

constexpr int kRowLookahead = 1;
constexpr int kRowRingTiles = 2 + 2 * kRowLookahead;

// Rings of the thread blocks with the same index on all ranks. A tile is `tile_tokens` tokens.
struct RowRings {
  int half, num_ranks, tile_tokens, row_vectors;

  // Where the rank `shift` ranks after the window's owner leaves row `token` of tile `tile`.
  __device__ __forceinline__ uint4* of(Window* window, int shift, int tile, int token) const {
    const int64_t ring = blockIdx.x * (num_ranks - 1) + shift - 1;
    const int64_t row = (ring * kRowRingTiles + tile % kRowRingTiles) * tile_tokens + token;
    return window->tiles[half] + row * row_vectors;
  }
};

}  // namespace kernelcat

// Rows of 16-byte vectors that ranks send into rings of tiles in each other's windows, a place for
// each token of a tile, with a signal for each tile.
//
// A thread block goes over its tiles in the same order on every rank, and signals a tile that holds
// no row too. So a ring of four tiles needs no answer from its reader: before tile k is sent,
// signal k - 2 of the reader has arrived, and the reader takes tile k - 4 before that signal.
#pragma once

#include <kernelcat/window.cuh>

namespace kernelcat {

constexpr int kRowRingTiles = 4;

// Rings of the thread blocks with the same index on all ranks. A tile is `tile_tokens` tokens.
struct RowRings {
  int half, num_ranks, tile_tokens, row_vectors;

  // Where `sender` leaves row `token` of tile `tile` in `window`.
  __device__ __forceinline__ uint4* of(Window* window, int sender, int tile, int token) const {
    const int64_t ring = blockIdx.x * num_ranks + sender;
    const int64_t row = (ring * kRowRingTiles + tile % kRowRingTiles) * tile_tokens + token;
    return window->tiles[half] + row * row_vectors;
  }
};

}  // namespace kernelcat

// Sums travel in tiles through rings, with a signal for each tile. While a tile travels, the tile
// before it is added up.
#include <kernelcat/expert_ranks.cuh>
#include <kernelcat/move_vectors.cuh>
#include <kernelcat/pdl.cuh>
#include <kernelcat/row_ring_tiles.cuh>

#include "sums.cuh"

namespace kernelcat {

template <typename T, int kRanks, int kThreads, bool kDependentLaunch>
__global__ void __launch_bounds__(kThreads, 2)
    moe_combine_tiles(const uint4* sums,      // (ranks * tokens, hidden), of T
                      const int* row_of,      // (ranks, tokens)
                      const int* expert_ids,  // (tokens, top_k)
                      const uint4* residual,  // (tokens, hidden), of T, or null
                      uint4* out,             // (tokens, hidden), of T
                      int num_tokens, int hidden, int top_k, int local_experts, int tile_tokens,
                      int rank, Window* window0, Window* window1, Window* window2, Window* window3,
                      Window* window4, Window* window5, Window* window6, Window* window7) {
  extern __shared__ uint8_t dynamic_shared[];
  const Windows<kRanks> windows{
      {window0, window1, window2, window3, window4, window5, window6, window7}, rank};
  Window* own = windows.of[0];
  if constexpr (kDependentLaunch) {
    grid_dependency_wait();
    launch_dependents();
  }
  constexpr int kUnroll = kSumUnroll<kRanks>;
  const uint32_t epoch = begin_epoch(own);
  if (has_failed(own)) return;
  const int num_vectors = hidden / 8, num_blocks = gridDim.x, block = blockIdx.x;
  const RowRings rings{static_cast<int>(epoch % 2), kRanks, tile_tokens, num_vectors};
  const int num_tiles = ceil_div(num_tokens, tile_tokens);
  const int count = (num_tiles - block + num_blocks - 1) / num_blocks;
  const auto first_of = [&](int tile) { return (tile * num_blocks + block) * tile_tokens; };
  const auto token_of = [&](int n) {
    return min(first_of(n / tile_tokens) + n % tile_tokens, num_tokens - 1);
  };
  // Of the thread block's tokens: (count * tile_tokens, kRanks), and (count * tile_tokens,).
  int* block_rows = reinterpret_cast<int*>(dynamic_shared);
  uint8_t* block_ranks = reinterpret_cast<uint8_t*>(block_rows + count * tile_tokens * kRanks);
  for (int i = threadIdx.x; i < count * tile_tokens * kRanks; i += kThreads) {
    block_rows[i] = row_of[i % kRanks * num_tokens + token_of(i / kRanks)];
  }
  find_ranks<kRanks, kThreads>(block_ranks, count * tile_tokens, expert_ids, top_k, local_experts,
                               token_of);
  const auto row_vectors = [&](int row) { return sums + static_cast<int64_t>(row) * num_vectors; };
  for (int tile = 0; tile <= count; ++tile) {
    for (int i = 0; i < tile_tokens && tile < count && first_of(tile) + i < num_tokens; ++i) {
#pragma unroll
      for (int shift = 1; shift < kRanks; ++shift) {
        const int row = block_rows[(tile * tile_tokens + i) * kRanks + windows.peer(shift)];
        if (row < 0) continue;
        const uint4* vectors = row_vectors(row);
        uint4* remote = rings.of(windows.of[shift], rank, tile, i);
        move_vectors<kThreads, kUnroll>(
            num_vectors, [&](int at) { return vectors[at]; },
            [&](int at, const uint4& vector) { remote[at] = vector; });
      }
    }
    if (tile < count) send_signals(windows, 0, epoch, tile + 1);
    if (tile == 0) continue;
    if (!wait_for_signals(windows, 0, epoch, tile)) break;
    const int first = first_of(tile - 1);
    for (int i = 0; i < tile_tokens && first + i < num_tokens; ++i) {
      const int64_t token = first + i;
      const int n = (tile - 1) * tile_tokens + i;
      const uint32_t ranks = block_ranks[n];
      const uint4* own_sums = row_vectors(block_rows[n * kRanks + rank]);
      const uint4* added_vectors = residual ? residual + token * num_vectors : nullptr;
      for (int at = threadIdx.x; at < num_vectors; at += kUnroll * kThreads) {
        uint4 parts[kUnroll * kRanks], added[kUnroll];
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) {
          const int place = at + j * kThreads;
          if (place >= num_vectors) continue;
          added[j] = residual ? added_vectors[place] : uint4{};
#pragma unroll
          for (int source = 0; source < kRanks; ++source) {
            if (!(ranks >> source & 1)) continue;
            const uint4* vectors = rings.of(own, source, tile - 1, i);
            parts[j * kRanks + source] = source == rank ? own_sums[place] : vectors[place];
          }
        }
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) {
          const int place = at + j * kThreads;
          if (place >= num_vectors) continue;
          out[token * num_vectors + place] =
              sum_of_ranks<T, kRanks>(parts + j * kRanks, ranks, added[j]);
        }
      }
    }
  }
  end_epoch(own, epoch);
}

}  // namespace kernelcat

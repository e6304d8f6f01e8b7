// Rows travel in tiles through rings, with a signal for each tile. While a tile travels, the tile
// before it is taken.
//
// Thread blocks from `num_row_blocks` on make the index maps meanwhile.
#include <kernelcat/pdl.cuh>
#include <kernelcat/row_ring_tiles.cuh>

#include "maps.cuh"
#include "shared_memory.cuh"

namespace kernelcat {

template <typename T, bool kFloat8, int kRanks, int kIdWords, int kThreads, bool kDependentLaunch>
__global__ void __launch_bounds__(kThreads, 2)
    moe_dispatch_tiles(const T* x,             // (tokens, hidden)
                       const int* expert_ids,  // (tokens, top_k)
                       const float* weights,   // (tokens, top_k)
                       uint4* rows,            // (ranks * tokens, hidden), T or float8
                       float* scale,           // (hidden / 128, ranks * tokens), or null
                       float* gates,           // (ranks * tokens, top_k)
                       int* row_of,            // (ranks, tokens)
                       int* source_offsets,    // (ranks + 1,)
                       int* offsets,           // (local_experts + 1,)
                       int* order,             // (ranks * tokens * top_k,)
                       int* position,          // (ranks * tokens, top_k)
                       int num_tokens, int hidden, int top_k, int local_experts, int num_row_blocks,
                       int tile_tokens, int rank, Window* window0, Window* window1, Window* window2,
                       Window* window3, Window* window4, Window* window5, Window* window6,
                       Window* window7) {
  extern __shared__ uint8_t dynamic_shared[];
  const Windows<kRanks> windows{
      {window0, window1, window2, window3, window4, window5, window6, window7}, rank};
  Window* own = windows.of[0];
  const Tokens<kIdWords> tokens{expert_ids, num_tokens, top_k, local_experts};
  const RowShape<kFloat8> shape(hidden, top_k);
  DispatchMemory<kRanks, kThreads> memory(dynamic_shared, shape, tokens);
  if constexpr (kDependentLaunch) {
    grid_dependency_wait();
    launch_dependents();
  }
  const uint32_t epoch = begin_epoch(own);
  if (has_failed(own)) return;
  Waiting waiting(own);
  const int block = blockIdx.x;
  if (block == 0) send_tokens<kRanks, kThreads>(tokens, windows, epoch);
  if (block >= num_row_blocks) {
    memory.arrivals.template collect<kThreads>(own, epoch, waiting);
    const Assignments<kRanks, kIdWords> assignments{tokens, memory.arrivals, own, rank, epoch};
    make_maps<kRanks, kThreads>({row_of, source_offsets, offsets, order, position}, assignments,
                                waiting, block - num_row_blocks, gridDim.x - num_row_blocks,
                                memory.scratch);
  } else {
    const RowRings rings{static_cast<int>(epoch % 2), kRanks, tile_tokens, shape.num_vectors()};
    const ReceivedRows<kFloat8> received{rows, scale, gates, kRanks * num_tokens};
    const int num_tiles = ceil_div(num_tokens, tile_tokens);
    const int count = (num_tiles - block + num_row_blocks - 1) / num_row_blocks;
    const auto first_of = [&](int tile) { return (tile * num_row_blocks + block) * tile_tokens; };
    for (int tile = 0; tile <= count; ++tile) {
      const int end = min(first_of(tile) + tile_tokens, num_tokens);
      for (int token = first_of(tile); tile < count && token < end; ++token) {
        const int64_t slot = static_cast<int64_t>(token) * top_k;
        const uint32_t ranks = ranks_of_token<kRanks>(expert_ids + slot, top_k, local_experts);
        if (ranks == 0) continue;
        const T* activations = x + static_cast<int64_t>(token) * hidden;
        const int place_in_tile = token - first_of(tile);
        send_row<kFloat8, kThreads>(
            shape, activations, weights + slot, memory.words, [&](int place, const uint4& vector) {
#pragma unroll
              for (int shift = 1; shift <= kRanks; ++shift) {
                if (ranks >> windows.peer(shift) & 1) {
                  rings.of(windows.of[shift % kRanks], rank, tile, place_in_tile)[place] = vector;
                }
              }
            });
      }
      if (tile < count) send_signals(windows, 0, epoch, tile + 1);
      if (tile == 0) {
        memory.arrivals.template collect<kThreads>(own, epoch, waiting);
        continue;
      }
      if (!wait_for_signals(windows, 0, epoch, tile)) break;
      const int first = first_of(tile - 1);
      for (int i = 0; i < tile_tokens && first + i < num_tokens; ++i) {
        for (int source = 0; source < kRanks; ++source) {
          const int row = memory.arrivals.row(source, first + i);
          if (row < 0) continue;
          const uint4* vectors = rings.of(own, source, tile - 1, i);
          move_vectors<kThreads, kRowUnroll>(
              shape.num_vectors(), [&](int place) { return vectors[place]; },
              [&](int place, const uint4& vector) { received.store(shape, row, place, vector); });
        }
      }
    }
  }
  if (num_tokens > 0) end_epoch(own, epoch);
}

}  // namespace kernelcat

// Rows travel in tiles through rings, with a signal for each tile. While a tile travels, the tile
// before it is taken.
//
// The first `num_map_blocks` thread blocks make the index maps meanwhile.
#include <kernelcat/move_vectors.cuh>
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
                       int num_tokens, int hidden, int top_k, int local_experts, int num_map_blocks,
                       int tile_tokens, int rank, Window* window0, Window* window1, Window* window2,
                       Window* window3, Window* window4, Window* window5, Window* window6,
                       Window* window7) {
  extern __shared__ uint8_t dynamic_shared[];
  const Windows<kRanks> windows{
      {window0, window1, window2, window3, window4, window5, window6, window7}, rank};
  Window* own = windows.of[0];
  const Tokens<kIdWords> tokens{expert_ids, num_tokens, top_k, local_experts};
  const RowShape<kFloat8> shape(hidden, top_k);
  DispatchMemory<kRanks, kThreads> memory(dynamic_shared, shape, tokens, tile_tokens);
  if constexpr (kDependentLaunch) {
    grid_dependency_wait();
    launch_dependents();
  }
  const uint32_t epoch = begin_epoch(own);
  if (has_failed(own)) return;
  Waiting waiting(own);
  const int map_block = blockIdx.x, block = map_block - num_map_blocks;
  if (map_block == 0) send_tokens<kRanks, kThreads>(tokens, windows, epoch);
  if (map_block < num_map_blocks) {
    make_maps<kRanks, kThreads>({offsets, order, position}, tokens, rank, own, epoch, waiting,
                                map_block, num_map_blocks, memory.scratch);
  } else {
    const RowRings rings{static_cast<int>(epoch % 2), kRanks, tile_tokens, shape.num_vectors()};
    const ReceivedRows<kFloat8> received{rows, scale, gates, kRanks * num_tokens};
    const Arrivals& arrivals = memory.arrivals;
    const int num_tiles = ceil_div(num_tokens, tile_tokens), step = gridDim.x - num_map_blocks;
    const int count = (num_tiles - block + step - 1) / step;
    const auto first_of = [&](int tile) { return (tile * step + block) * tile_tokens; };
    find_ranks<kRanks, kThreads>(
        memory.ranks, count * tile_tokens, expert_ids, top_k, local_experts,
        [&](int n) { return min(first_of(n / tile_tokens) + n % tile_tokens, num_tokens - 1); });
    memory.arrivals.template collect<kThreads>(own, epoch, waiting);
    if (block == 0) arrivals.template store_offsets<kRanks>(source_offsets);
    for (int tile = 0; tile <= count; ++tile) {
      const int num_sent = tile < count ? min(tile_tokens, num_tokens - first_of(tile)) : 0;
      const auto send_to = [&](int i, int place, const uint4& vector) {
        const uint32_t ranks = memory.ranks[tile * tile_tokens + i];
#pragma unroll
        for (int shift = 1; shift < kRanks; ++shift) {
          if (ranks >> windows.peer(shift) & 1) {
            rings.of(windows.of[shift], rank, tile, i)[place] = vector;
          }
        }
        const int row = arrivals.row(rank, first_of(tile) + i);
        if (row >= 0) received.store(shape, row, place, vector);
      };
      for (int i = 0; i < num_sent; ++i) {
        if (memory.ranks[tile * tile_tokens + i] == 0) continue;
        send_data<kFloat8, kThreads>(
            shape, x + static_cast<int64_t>(first_of(tile) + i) * hidden,
            memory.words + i * shape.num_scales, [] {},
            [&](int place, const uint4& vector) { send_to(i, place, vector); });
      }
      if constexpr (kFloat8) __syncthreads();
      for (int i = 0; i < num_sent; ++i) {
        if (memory.ranks[tile * tile_tokens + i] == 0) continue;
        const int64_t first_slot = static_cast<int64_t>(first_of(tile) + i) * top_k;
        RowWords<kFloat8>(shape, weights + first_slot)
            .send_with(shape, memory.words + i * shape.num_scales,
                       [&](int place, const uint4& vector) { send_to(i, place, vector); });
      }
      if (tile < count) send_signals(windows, 0, epoch, tile + 1);
      if (tile == 0) continue;
      if (!wait_for_signals(windows, 0, epoch, tile)) break;
      const int first = first_of(tile - 1);
      for (int i = 0; i < tile_tokens && first + i < num_tokens; ++i) {
        for (int source = 0; source < kRanks; ++source) {
          const int row = arrivals.row(source, first + i);
          if (threadIdx.x == 0) row_of[source * num_tokens + first + i] = row;
          if (row < 0 || source == rank) continue;
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

// Tokens go to the ranks of their experts, in one launch. The first `num_map_blocks` thread blocks
// say which tokens come, and make the index maps; the others move the rows.
#include <kernelcat/pdl.cuh>

#include "maps.cuh"
#include "rings.cuh"
#include "slots.cuh"

namespace kernelcat {

// Rows travel in rings of tiles of kTileTokens tokens; if that is 0, every token has a slot.
template <typename T, bool kFloat8, int kRanks, int kIdWords, int kTileTokens, int kThreads,
          bool kDependentLaunch>
__global__ void __launch_bounds__(kThreads, 2)
    moe_dispatch(const T* x,             // (tokens, hidden)
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
                 int rank, Window* window0, Window* window1, Window* window2, Window* window3,
                 Window* window4, Window* window5, Window* window6, Window* window7) {
  extern __shared__ uint8_t dynamic_shared[];
  const Windows<kRanks> windows{
      {window0, window1, window2, window3, window4, window5, window6, window7}, rank};
  Window* own = windows.of[0];
  const Tokens<kIdWords> tokens{expert_ids, num_tokens, top_k, local_experts};
  const RowShape<kFloat8> shape(hidden, top_k);
  DispatchMemory<kRanks, kThreads> memory(dynamic_shared, shape, num_tokens);
  if constexpr (kDependentLaunch) {
    grid_dependency_wait();
    launch_dependents();
  }
  const uint32_t epoch = begin_epoch(own);
  Waiting waiting(own);
  const int block = blockIdx.x;
  if (block < num_map_blocks) {
    if constexpr (kTileTokens > 0) {
      send_ids(tokens, windows, epoch, num_tokens, block * kThreads + threadIdx.x,
               num_map_blocks * kThreads, [](int n) { return n; });
    }
    const Maps maps{offsets, order, position};
    const MapMemory<kThreads> map_memory(memory.counts, local_experts);
    MapMaker<kRanks, kThreads, kIdWords>(maps, tokens, rank, own, epoch, block, num_map_blocks,
                                         map_memory)
        .make(waiting, memory.scratch);
  } else {
    DispatchRows<T, kFloat8, kRanks, kThreads, kIdWords> block_rows{
        x,
        tokens,
        weights,
        row_of,
        source_offsets,
        {rows, scale, gates, kRanks * num_tokens},
        shape,
        windows,
        memory,
        epoch,
        block - num_map_blocks,
        static_cast<int>(gridDim.x) - num_map_blocks};
    if constexpr (kTileTokens == 0) {
      move_in_slots(block_rows, waiting);
    } else {
      move_in_rings<kTileTokens>(block_rows, waiting);
    }
  }
  if (num_tokens > 0) end_epoch(own, epoch);
}

}  // namespace kernelcat

// Every token has a slot in the window of every rank: rows travel without flags and signals, and
// all of them are on their way before the first is taken.
//
// The first `num_map_blocks` thread blocks make the index maps meanwhile.
#include <kernelcat/pdl.cuh>
#include <kernelcat/row_slots.cuh>

#include "maps.cuh"
#include "shared_memory.cuh"

namespace kernelcat {

template <typename T, bool kFloat8, int kRanks, int kIdWords, int kThreads, bool kDependentLaunch>
__global__ void __launch_bounds__(kThreads, 2)
    moe_dispatch_ll(const T* x,             // (tokens, hidden)
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
  constexpr int kBuffers = 2;  // a row's words are sent while those of the next are written
  DispatchMemory<kRanks, kThreads> memory(dynamic_shared, shape, tokens, kBuffers);
  if constexpr (kDependentLaunch) {
    grid_dependency_wait();
    launch_dependents();
  }
  const uint32_t epoch = begin_epoch(own);
  Waiting waiting(own);
  const int map_block = blockIdx.x, first_token = map_block - num_map_blocks;
  if (map_block == 0) send_tokens<kRanks, kThreads>(tokens, windows, epoch);
  if (map_block < num_map_blocks) {
    make_maps<kRanks, kThreads>({offsets, order, position}, tokens, rank, own, epoch, waiting,
                                map_block, num_map_blocks, memory.scratch);
  } else {
    const RowSlots slots{static_cast<int>(epoch % 2), num_tokens, shape.num_vectors()};
    const int step = gridDim.x - num_map_blocks;
    int buffer = 0;
    for (int token = first_token; token < num_tokens; token += step) {
      const int id = id_of_lane(expert_ids, token, top_k);
      RowWords<kFloat8> row_words(shape, weights + static_cast<int64_t>(token) * top_k);
      float* words = memory.words + (buffer++ % kBuffers) * shape.num_scales;
      uint32_t ranks = 0;
      const auto send = [&](int place, const uint4& vector) {
#pragma unroll
        for (int shift = 1; shift <= kRanks; ++shift) {
          if (ranks >> windows.peer(shift) & 1) {
            send_to_slot(slots.of(windows.of[shift % kRanks], rank, token) + place, vector);
          }
        }
      };
      send_data<kFloat8, kThreads>(
          shape, x + static_cast<int64_t>(token) * hidden, words,
          [&] { ranks = ranks_of_token<kRanks>(id, local_experts); }, send);
      if constexpr (kFloat8) __syncthreads();
      row_words.send_with(shape, words, send);
    }
    memory.arrivals.template collect<kThreads>(own, epoch, waiting);
    if (first_token == 0) memory.arrivals.template store_offsets<kRanks>(source_offsets);
    const ReceivedRows<kFloat8> received{rows, scale, gates, kRanks * num_tokens};
    for (int token = first_token; token < num_tokens; token += step) {
      for (int source = 0; source < kRanks; ++source) {
        const int row = memory.arrivals.row(source, token);
        if (threadIdx.x == 0) row_of[source * num_tokens + token] = row;
        if (row < 0) continue;
        uint4* slot = slots.of(own, source, token);
        for (int first = threadIdx.x; first < slots.row_vectors; first += kRowUnroll * kThreads) {
          uint4 vectors[kRowUnroll];
          const auto place = [&](int i) {
            const int at = first + i * kThreads;
            return at < slots.row_vectors ? slot + at : nullptr;
          };
          take_from_slots(vectors, waiting, place, [&](int) { return source; });
#pragma unroll
          for (int i = 0; i < kRowUnroll; ++i) {
            if (place(i) != nullptr) received.store(shape, row, first + i * kThreads, vectors[i]);
          }
        }
      }
    }
  }
  if (num_tokens > 0) end_epoch(own, epoch);
}

}  // namespace kernelcat

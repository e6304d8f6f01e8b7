// What a thread block that moves rows works on.
#pragma once

#include <kernelcat/window.cuh>

#include "arrivals.cuh"
#include "row.cuh"

namespace kernelcat {

// The dynamic shared memory of a thread block; kernels/cuda/moe_dispatch/__init__.py has the same
// layout. `counts` is for thread blocks that make maps, what comes after it for the others; both
// lie at the same place.
template <int kRanks, int kThreads>
struct DispatchMemory {
  int2* scratch;  // (kThreads / 32,), of sums over the thread block
  int* counts;    // of the index maps (`MapMemory`)
  Arrivals arrivals;
  float* words;    // (2, num_scales), of two rows that are sent by turns
  uint8_t* ranks;  // of the thread block's tokens, where rows travel in rings

  template <bool kFloat8>
  __device__ __forceinline__ DispatchMemory(uint8_t* memory, const RowShape<kFloat8>& shape,
                                            int num_tokens) {
    scratch = reinterpret_cast<int2*>(memory);
    arrivals.num_tokens = num_tokens;
    arrivals.num_groups = ceil_div(kRanks * num_tokens, kGroupTokens);
    counts = reinterpret_cast<int*>(scratch + kThreads / kWarpThreads);
    arrivals.who = reinterpret_cast<uint64_t*>(counts);
    arrivals.rows = reinterpret_cast<int*>(arrivals.who + arrivals.num_groups);
    words = reinterpret_cast<float*>(arrivals.rows + arrivals.num_groups + 1);
    ranks = reinterpret_cast<uint8_t*>(words + 2 * shape.num_scales);
  }
};

template <typename T_, bool kFloat8, int kRanks_, int kThreads_, int kIdWords>
struct DispatchRows {
  using T = T_;
  static constexpr int kRanks = kRanks_, kThreads = kThreads_;

  const T* x;  // (num_tokens, hidden)
  const Tokens<kIdWords>& tokens;
  const float* weights;  // (num_tokens, top_k)
  int* row_of;           // (kRanks, num_tokens)
  int* source_offsets;   // (kRanks + 1,)
  ReceivedRows<kFloat8> received;
  RowShape<kFloat8> shape;
  Windows<kRanks> windows;
  DispatchMemory<kRanks, kThreads> memory;
  uint32_t epoch;
  int block, num_blocks;  // among those that move rows
  int num_sent = 0;

  // Gives the vectors of the row of `token` to `send(place, vector)`, after `begin()` was called;
  // the first loads are under way then. All threads call this together.
  template <typename Begin, typename Send>
  __device__ __forceinline__ void send_row(int token, Begin begin, Send send) {
    RowWords<kFloat8> row_words(shape, weights + static_cast<int64_t>(token) * shape.top_k);
    float* words = memory.words + num_sent++ % 2 * shape.num_scales;
    send_data<kThreads>(shape, x + static_cast<int64_t>(token) * shape.hidden, words, begin, send);
    if constexpr (kFloat8) __syncthreads();
    row_words.send_with(shape, words, send);
  }

  // Sends the ids of the thread block's tokens; rows that are sent after this go behind them. All
  // threads call this together.
  __device__ __forceinline__ void send_own_ids() const {
    const int count = (tokens.tokens - block + num_blocks - 1) / num_blocks;
    send_ids(tokens, windows, epoch, count, threadIdx.x, kThreads,
             [&](int n) { return block + n * num_blocks; });
    __syncthreads();
  }

  // Waits until it is known which tokens come. All threads call this together.
  __device__ __forceinline__ void collect_arrivals(Waiting& waiting) {
    const Comers comers = Comers::of<kRanks>(tokens, windows.of[0], windows.rank, epoch);
    memory.arrivals.template collect<kThreads>(comers, epoch, waiting, [&] {
      const SentIds<kRanks, kIdWords> sent{tokens, windows.of[0], epoch};
      return sent.missing_rank(windows.rank);
    });
    if (block == 0) memory.arrivals.template store_offsets<kRanks>(source_offsets);
  }

  // The row of a token of rank `source`, or -1; one thread stores it.
  __device__ __forceinline__ int find_row(int source, int token) const {
    const int row = memory.arrivals.row(source, token);
    if (threadIdx.x == 0) row_of[source * tokens.tokens + token] = row;
    return row;
  }
};

}  // namespace kernelcat

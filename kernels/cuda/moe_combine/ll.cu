// Every token has a slot in its owner's window for each rank: sums travel without flags and
// signals, and all of them are on their way before the first is taken. The first thread block
// greets the ranks: with no row for another one, a rank still says that it has begun.
#include <kernelcat/expert_ranks.cuh>
#include <kernelcat/move_vectors.cuh>
#include <kernelcat/pdl.cuh>
#include <kernelcat/row_slots.cuh>

#include "sums.cuh"

namespace kernelcat {

// A word to and from each rank, by a thread each.
template <int kRanks>
__device__ __forceinline__ void greet(const Windows<kRanks>& windows, uint32_t epoch,
                                      Waiting& waiting) {
  const int half = epoch % 2;
#pragma unroll
  for (int shift = 1; shift < kRanks; ++shift) {
    if (threadIdx.x != shift) continue;
    store_flagged(&windows.of[shift]->words[half][windows.rank][0], {}, epoch);
    const FlaggedWord* word = &windows.of[0]->words[half][windows.peer(shift)][0];
    waiting.until_none(
        [&] { return load_flagged(word).low_flag == epoch ? -1 : windows.peer(shift); });
  }
}

template <typename T, int kRanks, int kThreads, bool kDependentLaunch>
__global__ void __launch_bounds__(kThreads, 2)
    moe_combine_ll(const uint4* sums,      // (ranks * tokens, hidden), of T
                   const int* row_of,      // (ranks, tokens)
                   const int* expert_ids,  // (tokens, top_k)
                   const uint4* residual,  // (tokens, hidden), of T, or null
                   uint4* out,             // (tokens, hidden), of T
                   int num_tokens, int hidden, int top_k, int local_experts, int rank,
                   Window* window0, Window* window1, Window* window2, Window* window3,
                   Window* window4, Window* window5, Window* window6, Window* window7) {
  const Windows<kRanks> windows{
      {window0, window1, window2, window3, window4, window5, window6, window7}, rank};
  Window* own = windows.of[0];
  if constexpr (kDependentLaunch) {
    grid_dependency_wait();
    launch_dependents();
  }
  constexpr int kUnroll = kSumUnroll<kRanks>;
  const uint32_t epoch = begin_epoch(own);
  Waiting waiting(own);
  const int thread = threadIdx.x, num_vectors = hidden / 8;
  const int first_token = static_cast<int>(blockIdx.x) - 1, step = gridDim.x - 1;
  const RowSlots slots{static_cast<int>(epoch % 2), num_tokens, num_vectors};
  if (first_token < 0) greet(windows, epoch, waiting);
  for (int token = first_token; 0 <= token && token < num_tokens; token += step) {
#pragma unroll
    for (int shift = 1; shift < kRanks; ++shift) {
      const int row = row_of[windows.peer(shift) * num_tokens + token];
      if (row < 0) continue;
      const uint4* vectors = sums + static_cast<int64_t>(row) * num_vectors;
      uint4* slot = slots.of(windows.of[shift], rank, token);
      move_vectors<kThreads, kUnroll>(
          num_vectors, [&](int at) { return vectors[at]; },
          [&](int at, const uint4& vector) { send_to_slot(slot + at, vector); });
    }
  }
  for (int token = first_token; 0 <= token && token < num_tokens; token += step) {
    const int id = id_of_lane(expert_ids, token, top_k);
    const int own_row = row_of[rank * num_tokens + token];
    const uint32_t ranks = ranks_of_token<kRanks>(id, local_experts);
    const uint4* own_sums = sums + static_cast<int64_t>(own_row) * num_vectors;
    const int64_t first_out = static_cast<int64_t>(token) * num_vectors;
    for (int first = thread; first < num_vectors; first += kUnroll * kThreads) {
      uint4 parts[kUnroll * kRanks], added[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int at = first + i * kThreads;
        if (at >= num_vectors) continue;
        added[i] = residual ? residual[first_out + at] : uint4{};
#pragma unroll
        for (int source = 0; source < kRanks; ++source) {
          if (source == rank && own_row >= 0) parts[i * kRanks + source] = own_sums[at];
        }
      }
      take_from_slots(
          parts, waiting,
          [&](int i) {
            const int at = first + i / kRanks * kThreads, source = i % kRanks;
            const bool travels = source != rank && ranks >> source & 1 && at < num_vectors;
            return travels ? slots.of(own, source, token) + at : nullptr;
          },
          [](int i) { return i % kRanks; });
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int at = first + i * kThreads;
        if (at >= num_vectors) continue;
        out[first_out + at] = sum_of_ranks<T, kRanks>(parts + i * kRanks, ranks, added[i]);
      }
    }
  }
  end_epoch(own, epoch);
}

}  // namespace kernelcat

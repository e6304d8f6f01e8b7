// Every token has a slot in its owner's window for each rank: sums travel without flags and
// signals, and all of them are on their way before the first is taken. The first thread block
// greets the ranks: with no row for another one, a rank still says that it has begun.
#pragma once

#include <kernelcat/expert_ranks.cuh>
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

template <typename T, int kRanks, int kThreads>
__device__ __forceinline__ void combine_in_slots(const ExpertSums<T, kRanks, kThreads>& sums) {
  using Sums = ExpertSums<T, kRanks, kThreads>;
  const Windows<kRanks>& windows = sums.windows;
  const int num_tokens = sums.num_tokens, num_vectors = sums.num_vectors, rank = windows.rank;
  const int first_token = static_cast<int>(blockIdx.x) - 1, step = gridDim.x - 1;
  Waiting waiting(windows.of[0]);
  const RowSlots slots{static_cast<int>(sums.epoch % 2), num_tokens, num_vectors};
  if (first_token < 0) {
    greet(windows, sums.epoch, waiting);
    return;
  }
  for (int token = first_token; token < num_tokens; token += step) {
#pragma unroll
    for (int shift = 1; shift < kRanks; ++shift) {
      const int row = sums.row_of[windows.peer(shift) * num_tokens + token];
      if (row < 0) continue;
      uint4* slot = slots.of(windows.of[shift], rank, token);
      sums.send_row(row, [&](int at, const uint4& vector) { send_to_slot(slot + at, vector); });
    }
  }
  for (int token = first_token; token < num_tokens; token += step) {
    const int id = id_of_lane(sums.expert_ids, token, sums.top_k);
    const int own_row = sums.row_of[rank * num_tokens + token];
    const uint32_t ranks = ranks_of_token<kRanks>(id, sums.local_experts);
    sums.add_up(token, ranks, own_row, [&](uint4(&parts)[Sums::kParts], int first) {
      take_from_slots(
          parts, waiting,
          [&](int i) {
            const int at = first + i / kRanks * kThreads, source = i % kRanks;
            const bool travels = source != rank && ranks >> source & 1 && at < num_vectors;
            return travels ? slots.of(windows.of[0], source, token) + at : nullptr;
          },
          [](int i) { return i % kRanks; });
    });
  }
}

}  // namespace kernelcat

// Every token has a slot in the window of every rank: rows travel without flags and signals, and
// all of them are on their way before the first is taken. A rank's own rows go straight to their
// place. Ids travel before rows: behind them they would wait for the wire.
#pragma once

#include <kernelcat/expert_ranks.cuh>
#include <kernelcat/row_slots.cuh>

#include "dispatch_rows.cuh"

namespace kernelcat {

template <typename T, bool kFloat8, int kRanks, int kThreads, int kIdWords>
__device__ __forceinline__ void move_in_slots(
    DispatchRows<T, kFloat8, kRanks, kThreads, kIdWords>& rows, Waiting& waiting) {
  const Windows<kRanks>& windows = rows.windows;
  const Tokens<kIdWords>& tokens = rows.tokens;
  const RowSlots slots{static_cast<int>(rows.epoch % 2), tokens.tokens, rows.shape.num_vectors()};
  for (int token = rows.block; token < tokens.tokens; token += rows.num_blocks) {
    const int id = id_of_lane(tokens.expert_ids, token, rows.shape.top_k);
    uint32_t ranks = 0;
    rows.send_row(
        token,
        [&] {
          ranks = ranks_of_token<kRanks>(id, tokens.local_experts);
          if (token == rows.block) rows.send_own_ids();
        },
        [&](int place, const uint4& vector) {
#pragma unroll
          for (int shift = 1; shift < kRanks; ++shift) {
            if (ranks >> windows.peer(shift) & 1) {
              Window* window = windows.of[shift];
              send_to_slot(slots.of(window, windows.rank, token) + place, vector);
            }
          }
        });
  }
  rows.collect_arrivals(waiting);
  for (int token = rows.block; token < tokens.tokens; token += rows.num_blocks) {
    const int row = rows.find_row(windows.rank, token);
    if (row < 0) continue;
    rows.send_row(
        token, [] {},
        [&](int place, const uint4& vector) {
          rows.received.store(rows.shape, row, place, vector);
        });
  }
  for (int shift = 1; shift < kRanks; ++shift) {
    const int source = windows.peer(shift);
    for (int token = rows.block; token < tokens.tokens; token += rows.num_blocks) {
      const int row = rows.find_row(source, token);
      if (row < 0) continue;
      uint4* slot = slots.of(windows.of[0], source, token);
      for (int first = threadIdx.x; first < slots.row_vectors; first += kRowUnroll * kThreads) {
        uint4 vectors[kRowUnroll];
        const auto place = [&](int i) {
          const int at = first + i * kThreads;
          return at < slots.row_vectors ? slot + at : nullptr;
        };
        take_from_slots(vectors, waiting, place, [&](int) { return source; });
#pragma unroll
        for (int i = 0; i < kRowUnroll; ++i) {
          if (place(i) == nullptr) continue;
          rows.received.store(rows.shape, row, first + i * kThreads, vectors[i]);
        }
      }
    }
  }
}

}  // namespace kernelcat

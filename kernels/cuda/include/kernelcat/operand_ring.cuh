// A ring whose stages hold a k-block of both operands of a product, and the thread that fills it.
#pragma once

#include <kernelcat/block_schedule.cuh>
#include <kernelcat/cache_policy.cuh>
#include <kernelcat/pdl.cuh>
#include <kernelcat/wgmma.cuh>

namespace kernelcat {

// Whether `sharers` thread blocks load a part each of `rows` rows that all of them need: where
// parts are equal and whole atoms of 8 rows. Else they take turns, and each loads all rows of a
// k-block.
__host__ __device__ constexpr bool loads_parts(int rows, int sharers) {
  return rows % (8 * sharers) == 0;
}

// Starts to load kRows rows of an operand, from column `x` of k-block `k_block` and row `y` on.
// Where kSharers thread blocks of the cluster need the same rows, they load a part each or take
// turns, and multicast to all. This one has number `part` among them; `sharers` has their bits.
template <int kRows, int kSharers>
__device__ __forceinline__ void load_operand(uint8_t* stage, const TensorMap& map, int k_block,
                                             int x, int y, int part, uint16_t sharers,
                                             Barrier& full) {
  if constexpr (kSharers == 1) {
    tensor_load(stage, map, x, y, full, kDefaultPolicy);
  } else if constexpr (loads_parts(kRows, kSharers)) {
    const int first = part * (kRows / kSharers);
    tensor_load_multicast(stage + first * kRowBytes, map, x, y + first, full, sharers,
                          kDefaultPolicy);
  } else if (k_block % kSharers == part) {
    tensor_load_multicast(stage, map, x, y, full, sharers, kDefaultPolicy);
  }
}

// An operand of `size` rows whose boxes do not reach beyond its end. TMA takes more than twice the
// time of a row for a row of zeros outside. `edge` is the same operand with boxes of the rows,
// whole atoms of 8, that are left for the last part of the last tile.
struct FittedOperand {
  const TensorMap& whole;
  const TensorMap& edge;
  int size;
};

__device__ __forceinline__ void prefetch(const TensorMap& map) {
  prefetch_map(map);
}

__device__ __forceinline__ void prefetch(const FittedOperand& operand) {
  prefetch_map(operand.whole);
  prefetch_map(operand.edge);
}

// Rows that are loaded of the kRows from `first` on.
template <int kRows>
__device__ __forceinline__ int rows_inside(const TensorMap&, int first) {
  return kRows;
}

template <int kRows>
__device__ __forceinline__ int rows_inside(const FittedOperand& operand, int first) {
  return min(max(ceil_div(operand.size - first, 8), 0) * 8, kRows);
}

// As load_operand() above, of the `inside` rows that rows_inside() counts.
template <int kRows, int kSharers>
__device__ __forceinline__ void load_inside(uint8_t* stage, const TensorMap& map, int inside,
                                            int k_block, int x, int y, int part, uint16_t sharers,
                                            Barrier& full) {
  load_operand<kRows, kSharers>(stage, map, k_block, x, y, part, sharers, full);
}

template <int kRows, int kSharers>
__device__ __forceinline__ void load_inside(uint8_t* stage, const FittedOperand& operand,
                                            int inside, int k_block, int x, int y, int part,
                                            uint16_t sharers, Barrier& full) {
  constexpr bool kParts = loads_parts(kRows, kSharers);
  constexpr int kPart = kParts ? kRows / kSharers : kRows;
  const int left = inside - (kParts ? part * kPart : 0);
  if (left <= 0) return;
  load_operand<kRows, kSharers>(stage, left < kPart ? operand.edge : operand.whole, k_block, x, y,
                                part, sharers, full);
}

// The bits of the first thread block in each row of a cluster of rows x cols.
__host__ __device__ constexpr int first_column(int rows, int cols) {
  return rows == 0 ? 0 : 1 | first_column(rows - 1, cols) << cols;
}

// For a producer whose cluster is ready when it begins.
struct IsReady {
  __device__ __forceinline__ void operator()() const {}
};
template <typename Wait>
constexpr bool kHasToWait = true;
template <>
constexpr bool kHasToWait<IsReady> = false;

// The producer; runs in one thread. `shared` has kNumStages of `stages` (A's rows, then B's) and of
// the barriers `full` and `empty`. An operand is a TensorMap or a FittedOperand.
//
// `wait_for_cluster()`, if there is one, returns when the barriers of all thread blocks of the
// cluster are initialised. Before, an operand that this thread block does not share is loaded into
// the first stages; and in the end the producer waits until all stages have been read, because a
// thread block must not exit while others of its cluster may still arrive at its barriers.
template <typename Config, typename Shared, typename Schedule, typename Operand,
          typename Wait = IsReady>
__device__ __forceinline__ void produce_operands(Shared& shared, const Schedule& schedule,
                                                 const Operand& a, const Operand& b,
                                                 Wait wait_for_cluster = {}) {
  constexpr int kRow = (1 << Config::kClusterN) - 1;
  constexpr int kColumn = first_column(Config::kClusterM, Config::kClusterN);
  constexpr bool kWaits = Config::kClusterSize > 1 && kHasToWait<Wait>;
  constexpr bool kOwnsA = Config::kClusterN == 1, kOwnsB = Config::kClusterM == 1;
  constexpr bool kLoadsAhead = kWaits && (kOwnsA || kOwnsB);
  const int cluster_row = schedule.cluster_row(), cluster_col = schedule.cluster_col();
  const uint16_t row_sharers = kRow << cluster_row * Config::kClusterN;
  const uint16_t col_sharers = kColumn << cluster_col;
  PipelineState<Config::kNumStages> position;
  if constexpr (kWaits && !kLoadsAhead) wait_for_cluster();
  bool is_ahead = kLoadsAhead;
  schedule.for_each([&](const WorkItem& work, int row, int col) {
    const int rows = rows_inside<Config::BLOCK_M>(a, row);
    const int cols = rows_inside<Config::BLOCK_N>(b, col);
    const int outside = Config::BLOCK_M + Config::BLOCK_N - rows - cols;
    const auto load_a = [&](int stage, int k_block) {
      load_inside<Config::BLOCK_M, Config::kClusterN>(shared.stages[stage], a, rows, k_block,
                                                      k_block * Config::BLOCK_K, row, cluster_col,
                                                      row_sharers, shared.full[stage]);
    };
    const auto load_b = [&](int stage, int k_block) {
      load_inside<Config::BLOCK_N, Config::kClusterM>(
          shared.stages[stage] + Config::kStageBytesA, b, cols, k_block, k_block * Config::BLOCK_K,
          col, cluster_row, col_sharers, shared.full[stage]);
    };
    const auto expect = [&](int stage) {
      shared.full[stage].arrive_expect(Config::kStageBytes - outside * kRowBytes);
    };
    int k_block = work.k_begin;
    if (kLoadsAhead && is_ahead) {
      const int num_ahead = min(work.k_end - work.k_begin, min(Config::kNumStages, 4));
      for (int i = 0; i < num_ahead; ++i) {
        expect(i);
        if (kOwnsA)
          load_a(i, k_block + i);
        else
          load_b(i, k_block + i);
      }
      wait_for_cluster();
      for (int i = 0; i < num_ahead; ++i) {
        if (kOwnsA)
          load_b(i, k_block + i);
        else
          load_a(i, k_block + i);
        position.advance();
      }
      k_block += num_ahead;
      is_ahead = false;
    }
    for (; k_block < work.k_end; ++k_block) {
      shared.empty[position.stage].wait(position.phase ^ 1);
      expect(position.stage);
      load_a(position.stage, k_block);
      load_b(position.stage, k_block);
      position.advance();
    }
  });
  launch_dependents();
  if constexpr (kWaits) {
    for (int i = 0; i < Config::kNumStages; ++i) {
      shared.empty[position.stage].wait(position.phase ^ 1);
      position.advance();
    }
  }
}

}  // namespace kernelcat

// A ring whose stages hold a k-block of both operands of a product, and the thread that fills it.
#pragma once

#include <kernelcat/block_schedule.cuh>
#include <kernelcat/cache_policy.cuh>
#include <kernelcat/pdl.cuh>
#include <kernelcat/wgmma.cuh>

namespace kernelcat {

// How many of `sharers` thread blocks load a part of `rows` rows that all of them need: the most
// for which parts are equal and whole atoms of 8 rows.
__host__ __device__ constexpr int num_loaders(int rows, int sharers) {
  while (rows % (8 * sharers) != 0) --sharers;
  return sharers;
}

// Starts to load kRows rows of an operand, from column `x` and row `y` on. Where kSharers thread
// blocks of the cluster need the same rows, they load a part each, the last of them perhaps none,
// and multicast the part to all. This one has number `part` among them; `sharers` has their bits.
template <int kRows, int kSharers>
__device__ __forceinline__ void load_operand(uint8_t* stage, const TensorMap& map, int x, int y,
                                             int part, uint16_t sharers, Barrier& full) {
  if constexpr (kSharers == 1) {
    tensor_load(stage, map, x, y, full, kDefaultPolicy);
  } else {
    constexpr int kLoaders = num_loaders(kRows, kSharers);
    if (kLoaders < kSharers && part >= kLoaders) return;
    const int first = part * (kRows / kLoaders);
    tensor_load_multicast(stage + first * kRowBytes, map, x, y + first, full, sharers,
                          kDefaultPolicy);
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
__device__ __forceinline__ void load_inside(uint8_t* stage, const TensorMap& map, int inside, int x,
                                            int y, int part, uint16_t sharers, Barrier& full) {
  load_operand<kRows, kSharers>(stage, map, x, y, part, sharers, full);
}

template <int kRows, int kSharers>
__device__ __forceinline__ void load_inside(uint8_t* stage, const FittedOperand& operand,
                                            int inside, int x, int y, int part, uint16_t sharers,
                                            Barrier& full) {
  constexpr int kPart = kRows / num_loaders(kRows, kSharers);
  const int left = inside - part * kPart;
  if (left <= 0) return;
  load_operand<kRows, kSharers>(stage, left < kPart ? operand.edge : operand.whole, x, y, part,
                                sharers, full);
}

// The bits of the first thread block in each row of a cluster of rows x cols.
__host__ __device__ constexpr int first_column(int rows, int cols) {
  return rows == 0 ? 0 : 1 | first_column(rows - 1, cols) << cols;
}

// The producer; runs in one thread. `shared` has kNumStages of `stages` (A's rows, then B's) and of
// the barriers `full` and `empty`. An operand is a TensorMap or a FittedOperand.
template <typename Config, typename Shared, typename Operand>
__device__ __forceinline__ void produce_operands(Shared& shared,
                                                 const BlockSchedule<Config>& schedule,
                                                 const Operand& a, const Operand& b) {
  constexpr int kRow = (1 << Config::kClusterN) - 1;
  constexpr int kColumn = first_column(Config::kClusterM, Config::kClusterN);
  const int cluster_row = schedule.cluster_row(), cluster_col = schedule.cluster_col();
  const uint16_t row_sharers = kRow << cluster_row * Config::kClusterN;
  const uint16_t col_sharers = kColumn << cluster_col;
  PipelineState<Config::kNumStages> position;
  schedule.for_each([&](const WorkItem& work, int row, int col) {
    const int rows = rows_inside<Config::BLOCK_M>(a, row);
    const int cols = rows_inside<Config::BLOCK_N>(b, col);
    const int outside = Config::BLOCK_M + Config::BLOCK_N - rows - cols;
    for (int k_block = work.k_begin; k_block < work.k_end; ++k_block) {
      uint8_t* stage = shared.stages[position.stage];
      Barrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase ^ 1);
      full.arrive_expect(Config::kStageBytes - outside * kRowBytes);
      const int k = k_block * Config::BLOCK_K;
      load_inside<Config::BLOCK_M, Config::kClusterN>(stage, a, rows, k, row, cluster_col,
                                                      row_sharers, full);
      load_inside<Config::BLOCK_N, Config::kClusterM>(stage + Config::kStageBytesA, b, cols, k, col,
                                                      cluster_row, col_sharers, full);
      position.advance();
    }
  });
  launch_dependents();
}

}  // namespace kernelcat

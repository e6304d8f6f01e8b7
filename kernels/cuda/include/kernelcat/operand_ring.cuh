// A ring whose stages hold a k-block of both operands of a product, and the thread that fills it.
#pragma once

#include <kernelcat/block_schedule.cuh>
#include <kernelcat/cache_policy.cuh>
#include <kernelcat/pdl.cuh>
#include <kernelcat/wgmma.cuh>

namespace kernelcat {

// Starts to load kRows rows of an operand, from column `x` and row `y` on. Where kSharers thread
// blocks of the cluster need the same rows, each loads its part and multicasts the part to all.
template <int kRows, int kSharers>
__device__ __forceinline__ void load_operand(uint8_t* stage, const TensorMap& map, int x, int y,
                                             int rank, Barrier& full) {
  if constexpr (kSharers == 1) {
    tensor_load(stage, map, x, y, full, kDefaultPolicy);
  } else {
    const int first = rank * (kRows / kSharers);
    tensor_load_multicast(stage + first * kRowBytes, map, x, y + first, full, (1 << kSharers) - 1,
                          kDefaultPolicy);
  }
}

// The producer; runs in one thread. `shared` has kNumStages of `stages` (A's rows, then B's) and of
// the barriers `full` and `empty`.
template <typename Config, typename Shared>
__device__ __forceinline__ void produce_operands(Shared& shared,
                                                 const BlockSchedule<Config>& schedule,
                                                 const TensorMap& map_a, const TensorMap& map_b) {
  PipelineState<Config::kNumStages> position;
  schedule.for_each([&](const WorkItem& work, int row, int col) {
    for (int k_block = work.k_begin; k_block < work.k_end; ++k_block) {
      uint8_t* stage = shared.stages[position.stage];
      Barrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase ^ 1);
      full.arrive_expect(Config::kStageBytes);
      load_operand<Config::BLOCK_M, Config::kClusterN>(stage, map_a, k_block * Config::BLOCK_K, row,
                                                       schedule.rank, full);
      load_operand<Config::BLOCK_N, Config::kClusterM>(
          stage + Config::kStageBytesA, map_b, k_block * Config::BLOCK_K, col, schedule.rank, full);
      position.advance();
    }
  });
  launch_dependents();
}

}  // namespace kernelcat

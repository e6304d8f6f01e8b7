// A ring of stages, each a block of k of both operands: how one thread keeps it full by TMA, and
// how the warps that multiply give stages back.
#pragma once

#include <kernelcat/block_schedule.cuh>
#include <kernelcat/cache_policy.cuh>
#include <kernelcat/pdl.cuh>
#include <kernelcat/sync.cuh>
#include <kernelcat/wgmma.cuh>

namespace kernelcat {

// kRows rows of an operand from row `y` on. Where kSharers blocks need the same, each loads its
// part for all of them.
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

// Runs in one thread. `shared` has kNumStages of `stages`, each A's rows and then B's, and of the
// barriers `full` and `empty`.
template <typename Config, typename Shared>
__device__ __forceinline__ void produce_operands(Shared& shared,
                                                 const BlockSchedule<Config>& schedule,
                                                 const TensorMap& map_a, const TensorMap& map_b) {
  PipelineState<Config::kNumStages> position;
  schedule.for_each([&](const Work& work, int row, int col) {
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

// A warp is done with a stage: every block that loads into it must know.
template <typename Config>
__device__ __forceinline__ void release_stage(Barrier& empty) {
  const int lane = lane_index();
  if constexpr (Config::kClusterSize == 1) {
    if (lane == 0) empty.arrive();
  } else {
    if (lane < Config::kClusterSize) arrive_remote(empty, lane);
  }
}

}  // namespace kernelcat

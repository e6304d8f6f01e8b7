// What the wgmma kernel fixes at compile time, and its shared memory.
#pragma once

#include <kernelcat/gating.cuh>
#include <kernelcat/mbarrier.cuh>
#include <kernelcat/wgmma_stage.cuh>

#include "expert_tiles.cuh"

namespace kernelcat {

// A tile is BLOCK_M rows of one expert by BLOCK_N rows of its weights. Its last rows and columns
// may lie outside the expert; they are computed, but not stored. With kGather the rows of A are
// tokens. With kPartial the kernel stores float32 rows that a second kernel adds up.
template <typename T_, int BLOCK_M_, int BLOCK_N_, int kNumStages_, Gating kGating_, bool kGather_,
          bool kPartial_>
struct ExpertTileConfig {
  using T = T_;
  static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, kNumStages = kNumStages_;
  static constexpr int BLOCK_K = kernelcat::BLOCK_K;
  static constexpr Gating kGating = kGating_;
  static constexpr bool kGather = kGather_, kPartial = kPartial_;

  static_assert(!kPartial || !kIsGated<kGating>, "partial rows have no activation");

  static constexpr int kNumConsumers = BLOCK_M > 64 ? 2 : 1;
  static constexpr int kNumThreads = kWarpgroupThreads * (kNumConsumers + 1);
  static constexpr int kRows = BLOCK_M / kNumConsumers;  // of a consumer
  static constexpr int kNumWgmmas = kRows / kWgmmaM;     // below each other
  static constexpr bool kReallocate = kNumConsumers == 2;
  static constexpr int kProducerRegisters = kGather ? 72 : 40;
  static constexpr int kConsumerRegisters = kGather ? 216 : 232;

  static constexpr int kStageBytesA = BLOCK_M * kRowBytes;
  static constexpr int kStageBytesW = BLOCK_N * kRowBytes;
  static constexpr int kStageBytes = kStageBytesA + kStageBytesW;

  using Tiles = ExpertTiles<BLOCK_M, BLOCK_N>;
  using Sums = float[kNumWgmmas][BLOCK_N / 2];
};

template <typename Config>
struct ExpertShared {
  alignas(1024) uint8_t stages[Config::kNumStages][Config::kStageBytes];  // A, then W
  float bias[Config::kNumConsumers][Config::BLOCK_N];
  Barrier full[Config::kNumStages];
  Barrier empty[Config::kNumStages];

  // The lists of ExpertTiles, 2 * (experts + 1) numbers, follow the barriers.
  __device__ __forceinline__ int* lists() {
    return reinterpret_cast<int*>(empty + Config::kNumStages);
  }
};

}  // namespace kernelcat

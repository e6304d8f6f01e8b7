// What the wgmma kernel fixes at compile time, and its shared memory.
#pragma once

#include <kernelcat/block_scales.cuh>
#include <kernelcat/gating.cuh>
#include <kernelcat/wgmma_stage.cuh>

#include "expert_tiles.cuh"

namespace kernelcat {

// A tile is BLOCK_M rows of one expert by BLOCK_N rows of its weights. Its last rows and columns
// may lie outside the expert; they are computed, but not stored. `Element` is the type of A and of
// the weights, T or float8_e4m3fn with scales. With kGather the rows of A are tokens. With kAtomic
// rows are added to the sums of their tokens. Two consumers share a tile, or with kTurns each
// computes a tile: one multiplies while the other one stores. With kPairs a cluster of two thread
// blocks computes a pair of tiles.
template <typename T_, typename Element_, int BLOCK_M_, int BLOCK_N_, int kNumStages_,
          Gating kGating_, bool kGather_, bool kAtomic_, bool kTurns_, bool kPairs_>
struct ExpertTileConfig {
  using T = T_;
  using Element = Element_;
  static constexpr bool kScaled = sizeof(Element) == 1;
  static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, kNumStages = kNumStages_;
  static constexpr int BLOCK_K = kRowBytes / sizeof(Element);
  static constexpr Gating kGating = kGating_;
  static constexpr bool kGather = kGather_, kAtomic = kAtomic_, kTurns = kTurns_;
  static constexpr bool kPairs = kPairs_;
  static constexpr int kClusterSize = kPairs ? 2 : 1;

  static_assert(!kAtomic || !kIsGated<kGating>, "rows that are added up have no activation");
  static_assert(!kTurns || (BLOCK_M == 128 && !kScaled), "sums and products fit into registers");

  static constexpr int kNumConsumers = BLOCK_M > 64 ? 2 : 1;
  static constexpr int kNumThreads = kWarpgroupThreads * (kNumConsumers + 1);
  static constexpr int kConsumersPerTile = kTurns ? 1 : kNumConsumers;
  static constexpr int kRows = BLOCK_M / kConsumersPerTile;  // of a consumer
  static constexpr int kNumWgmmas = kRows / kWgmmaM;         // below each other
  static constexpr bool kReallocate = kNumConsumers == 2;
  // Whether the wgmmas of a k-block run while the products of the one before are promoted.
  static constexpr bool kAhead = kScaled && kNumWgmmas == 1 && BLOCK_N <= 128;
  // Threads that copy rows of A or scales by cp.async. Otherwise a single thread loads by TMA.
  static constexpr int kCopyingThreads = kGather || kScaled ? kWarpgroupThreads : 0;
  static constexpr int kProducerRegisters = kTurns ? (kGather ? 40 : 24) : kGather ? 72 : 40;
  static constexpr int kConsumerRegisters = kTurns ? (kGather ? 232 : 240) : kGather ? 216 : 232;

  // As in DecodedConfig: 384 threads begin with 168 registers each.
  static_assert(!kReallocate || 2 * kConsumerRegisters + kProducerRegisters <= 3 * 168);
  static constexpr bool kGathersByOffset = kTurns;  // see GatheredRows

  static constexpr int kStageBytesA = BLOCK_M * kRowBytes;
  static constexpr int kStageBytesW = BLOCK_N * kRowBytes;
  static constexpr int kStageBytes = kStageBytesA + kStageBytesW;

  using Tiles = ExpertTiles<BLOCK_M, BLOCK_N, kPairs>;
  using Products = float[BLOCK_N / 2];  // of one wgmma
  using Sums = Products[kNumWgmmas];
  using Scales = StageScales<kScaled ? BLOCK_M : 2>;
  static constexpr int kNumScales = kScaled ? kNumStages : 1;  // stages of scales
};

template <typename Config>
struct ExpertShared {
  alignas(1024) uint8_t stages[Config::kNumStages][Config::kStageBytes];  // A, then W
  typename Config::Scales scales[Config::kNumScales];
  float bias[Config::kNumConsumers][Config::BLOCK_N];
  Barrier full[Config::kNumStages];
  Barrier empty[Config::kNumStages];

  // With kTurns a barrier of each consumer follows, then the lists of ExpertTiles, 2 * (experts +
  // 1) numbers.
  __device__ __forceinline__ Barrier* turns() { return empty + Config::kNumStages; }
  __device__ __forceinline__ int* lists() {
    return reinterpret_cast<int*>(turns() + (Config::kTurns ? 2 : 0));
  }
};

}  // namespace kernelcat

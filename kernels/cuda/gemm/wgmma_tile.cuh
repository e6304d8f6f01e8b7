// What the wgmma kernel fixes at compile time, and its shared memory.
#pragma once

#include <kernelcat/cache_policy.cuh>
#include <kernelcat/cluster.cuh>
#include <kernelcat/wgmma_stage.cuh>

#include "gemm_output.cuh"

namespace kernelcat {

// The widest of 64, 32 and 16 that divides `count` and is within `limit`; of other multiples of 8
// the widest part within `limit` that is one, too.
__host__ __device__ constexpr int widest(int count, int limit) {
  for (int width = 64; width >= 16; width /= 2) {
    if (count % width == 0 && width <= limit) return width;
  }
  int parts = ceil_div(count, limit);
  while (count % (8 * parts) != 0) ++parts;
  return count / parts;
}

// A tile is BLOCK_M x BLOCK_N of Z = A @ B^T; with kSwap it is one of Z^T, "A" is B, and "rows" are
// columns of Z. The operand with more rows then fills the 64 rows of wgmma.
//
// The consumers share a tile, or with kPingpong each computes a tile: one multiplies while the
// other stores. The tiles of a cluster lie in kClusterM rows of kClusterN tiles: its thread blocks
// multicast A to those of their row and B to those of their column. With kSplit some tiles are
// computed in splits of their k range. Only the first kLastDepth columns of the last k-block are
// multiplied; the others are zero.
template <typename T_, int BLOCK_M_, int BLOCK_N_, int kNumStages_, bool kPingpong_, bool kSwap_,
          int kClusterM_, int kClusterN_, bool kSplit_, bool kTmaStore_, Activation kActivation,
          bool kResidual_, int kLastDepth_>
struct WgmmaTile {
  using T = T_;
  using Output = GemmOutput<T, kActivation, kResidual_>;
  static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, kNumStages = kNumStages_;
  static constexpr int BLOCK_K = kernelcat::BLOCK_K;
  static constexpr bool kPingpong = kPingpong_, kSwap = kSwap_;
  static constexpr bool kSplit = kSplit_, kTmaStore = kTmaStore_;
  static constexpr int kLastDepth = kLastDepth_;
  static constexpr bool kResidual = kResidual_, kPaired = Output::kPaired;
  static constexpr int kClusterM = kClusterM_, kClusterN = kClusterN_;
  static constexpr int kClusterSize = kClusterM * kClusterN;
  // Thread blocks in the row and the column of one: it shares an operand with them.
  static constexpr int kNumSharers = kClusterM + kClusterN - 1;

  // Of 192 rows three consumers take 64 each.
  static constexpr int kNumConsumers = BLOCK_M == 192 ? 3 : kPingpong || BLOCK_M > 64 ? 2 : 1;
  static constexpr int kConsumersPerTile = kPingpong ? 1 : kNumConsumers;
  // Beside more consumers a whole warpgroup loads, because registers are reallocated between whole
  // warpgroups. Beside one consumer a warp loads, which leaves room for a second thread block on
  // the SM, e.g. one of the next launch that begins early.
  static constexpr bool kReallocate = kNumConsumers > 1;
  static constexpr int kNumThreads =
      kWarpgroupThreads * kNumConsumers + (kReallocate ? kWarpgroupThreads : kWarpThreads);
  static constexpr int kBlocksPerSm = kReallocate ? 1 : 2;
  static constexpr int kRows = BLOCK_M / kConsumersPerTile;  // of a consumer
  static constexpr int kNumWgmmas = kRows / kWgmmaM;         // below each other
  static constexpr bool kManySums = kNumWgmmas * BLOCK_N > 256;
  static constexpr int kProducerRegisters = kManySums || kNumConsumers == 3 ? 24 : 40;
  static constexpr int kConsumerRegisters = kNumConsumers == 3 ? 160 : kManySums ? 240 : 232;

  static constexpr int kTileBias = kSwap ? kRows : BLOCK_N;  // columns of Z of a consumer

  static constexpr int kStageBytesA = BLOCK_M * kRowBytes;
  static constexpr int kStageBytes = kStageBytesA + BLOCK_N * kRowBytes;
  static_assert(BLOCK_M % 8 == 0 && BLOCK_N % 8 == 0, "whole atoms");

  // D leaves in chunks of kChunkRows x kChunkCols, through two buffers of each consumer. A chunk is
  // made of 64 rows and kChunkSums columns of the accumulators of one wgmma. Three consumers have
  // narrower chunks, which leaves room for a stage more.
  static constexpr int kPair = kPaired ? 2 : 1;
  static constexpr int kWidest = kNumConsumers == 3 ? 32 : 64;
  static constexpr int kChunkRows = kSwap ? widest(BLOCK_N, kWidest) : kWgmmaM;
  static constexpr int kChunkCols = kSwap ? kWgmmaM / kPair : widest(BLOCK_N / kPair, kWidest);
  static constexpr int kChunkSums = kSwap ? kChunkRows : kChunkCols * kPair;
  static constexpr int kChunkBytes = kChunkRows * kChunkCols * 2;
  static constexpr int kChunksPerWgmma = BLOCK_N / kChunkSums;
  static_assert(BLOCK_N % kChunkSums == 0);

  using Sums = float[BLOCK_N / 2];
  using Accumulators = Sums[kNumWgmmas];
};

template <typename Config>
struct WgmmaShared {
  alignas(1024) uint8_t stages[Config::kNumStages][Config::kStageBytes];  // A, then B
  alignas(1024) uint8_t chunks[Config::kNumConsumers][2][Config::kChunkBytes];
  alignas(4) typename Config::T bias[Config::kNumConsumers][Config::kTileBias];
  Barrier full[Config::kNumStages];
  Barrier empty[Config::kNumStages];
  Barrier turn[2];  // with kPingpong: of each consumer
  uint32_t is_last[Config::kNumConsumers];
};

}  // namespace kernelcat

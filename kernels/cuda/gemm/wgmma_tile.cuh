// What the wgmma kernel fixes at compile time, and its shared memory.
#pragma once

#include <kernelcat/cache_policy.cuh>
#include <kernelcat/cluster.cuh>
#include <kernelcat/wgmma_stage.cuh>

#include "gemm_output.cuh"

namespace kernelcat {

constexpr int kKb = 1024;

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

// The widest of 64, 32 and 16 within `limit` and `count`.
__host__ __device__ constexpr int widest_power(int count, int limit) {
  int width = 64;
  while (width > limit || width > count) width /= 2;
  return width;
}

// The width of the fewest parts within `limit`, a multiple of `step`, that cover `count` where the
// last part may overlap the one before.
__host__ __device__ constexpr int widest_overlapping(int count, int limit, int step) {
  return ceil_div(count, step * ceil_div(count, limit)) * step;
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
  // made of 64 rows and kChunkSums columns of the accumulators of one wgmma. The last chunk may
  // overlap the one before, and then stores the same values again; not with a residual, which may
  // lie where D does. Chunks are the widest beside which six stages fit on an SM,
  // eight with one consumer, or as many as beside the narrowest ones.
  static constexpr int kPair = kPaired ? 2 : 1;
  template <int kLimit>
  struct Chunk {
    static constexpr int kCount = kSwap ? BLOCK_N : BLOCK_N / kPair;
    static constexpr int kWidth = kResidual ? widest(kCount, kLimit)
                                  : kSwap   ? widest_overlapping(kCount, kLimit, 8 * kPair)
                                            : widest_power(kCount, kLimit);
    static constexpr int kBytes = kWidth * (kSwap ? kWgmmaM / kPair : kWgmmaM) * 2;
    static constexpr int kBeside = 2 * kKb + 64 + kNumConsumers * 2 * (kTileBias + kBytes);
    static constexpr int kStages = (228 * kKb - kBeside) / (kStageBytes + 16);
  };
  static constexpr int kEnough = kNumConsumers == 1 ? 8 : 6, kMost = Chunk<16>::kStages;
  static constexpr int kEnoughStages = kMost < kEnough ? kMost : kEnough;
  static constexpr int kWidest = Chunk<64>::kStages >= kEnoughStages   ? 64
                                 : Chunk<32>::kStages >= kEnoughStages ? 32
                                                                       : 16;
  static constexpr int kChunkWidth = Chunk<kWidest>::kWidth;
  static constexpr int kChunkRows = kSwap ? kChunkWidth : kWgmmaM;
  static constexpr int kChunkCols = kSwap ? kWgmmaM / kPair : kChunkWidth;
  static constexpr int kChunkSums = kSwap ? kChunkRows : kChunkCols * kPair;
  static constexpr int kChunkBytes = kChunkRows * kChunkCols * 2;
  static constexpr int kChunksPerWgmma = ceil_div(BLOCK_N, kChunkSums);

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

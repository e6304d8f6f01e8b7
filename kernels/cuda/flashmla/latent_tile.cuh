// Shapes and shared memory of flashmla/wgmma.
#pragma once

#include <kernelcat/mbarrier.cuh>
#include <kernelcat/wgmma.cuh>

#include "gathered_rows.cuh"
#include "latent.cuh"
#include "segments.cuh"

namespace kernelcat {

// A thread block has 64 rows, and takes 64 tokens at a time. The kRowTiles thread blocks of a team
// have neighbouring rows of the same tokens; those of a cluster load the tokens together.
template <typename T_, int kPageSize_, int kRowTiles_, int kClusterSize_>
struct LatentTile {
  using T = T_;
  using Cached = T_;
  static constexpr int BLOCK_M = kWgmmaM, BLOCK_N = 64;
  static constexpr int kPageSize = kPageSize_, kRowTiles = kRowTiles_;
  static constexpr int kTeamBlocks = kRowTiles;
  static constexpr int kClusterSize = kClusterSize_;
  static constexpr bool kGathers = kPageSize == 1;                 // by cp.async; else by TMA
  static constexpr int kArrivals = kGathers ? kGatherThreads : 1;  // at a full barrier
  static constexpr int kConsumerThreads = 2 * kWarpgroupThreads;
  static constexpr int kNumThreads = kConsumerThreads + kWarpgroupThreads;
  static constexpr int kNumWarps = kNumThreads / kWarpThreads;
  static constexpr int kProducerRegisters = kGathers ? 56 : 40;
  static constexpr int kConsumerRegisters = kGathers ? 224 : 232;
  static constexpr int kColumns = kRowBytes / 2;  // of a chunk
  static constexpr int kValueChunks = kLatent / kColumns, kChunks = kValueChunks + 1;
  static constexpr int kHalfChunks = kValueChunks / 2;
  static constexpr int kChunkBytes = BLOCK_N * kRowBytes;
  // Keys land in pieces: the rotated part, then pairs of chunks.
  static constexpr int kPieceChunks = 2, kPieces = 1 + kValueChunks / kPieceChunks;
  static constexpr int kLoadedTokens = BLOCK_N / kClusterSize;  // by each thread block
  // A TMA box lies within a page.
  static constexpr int kBoxTokens = kLoadedTokens < kPageSize ? kLoadedTokens : kPageSize;
  static constexpr int kBoxes = kLoadedTokens / kBoxTokens;
  // Whether warpgroup 1 waits for the first scores of a segment whose only KV tile is not its own.
  // Nothing depends on it, but compute-sanitizer's synccheck asks for a wait between two arrivals.
  // Kernels that were measured without it keep their machine code.
  static constexpr bool kAlwaysWaits = false;
  // Whether partial results have all rows of a row tile, also those that its sequence lacks. Here
  // too, kernels that were measured so keep their machine code.
  static constexpr bool kPadsParts = true;
  using List = WorkList<BLOCK_M * kRowTiles, BLOCK_N>;
  static_assert(kGathers || (kBoxTokens % 8 == 0 && kBoxes <= kWarpThreads));
  static_assert(kRowTiles % kClusterSize == 0);

  // Warpgroup `half` computes scores beginning with the chunks of its half of the columns.
  static __device__ __forceinline__ int chunk(int half, int piece, int i) {
    const int index = (piece - 1) * kPieceChunks + i;
    return (half * kHalfChunks + index) % kValueChunks;
  }
};

// The phases of both stages' barriers.
struct StagePhases {
  uint32_t bits = 0;  // bit s: of stage s

  __device__ __forceinline__ uint32_t of(int stage) const { return bits >> stage & 1; }
  __device__ __forceinline__ void flip(int stage) { bits ^= 1 << stage; }
};

// KV tiles use the two stages in turn; warpgroup s computes the scores of stage s.
template <typename Tile>
struct LatentShared {
  static constexpr int kRow = Tile::BLOCK_M;
  alignas(1024) uint8_t queries[Tile::kValueChunks][Tile::kChunkBytes];
  // Of each warpgroup's KV tile. weights[0] first holds the rotated part of the queries.
  alignas(1024) uint8_t weights[2][Tile::kChunkBytes];
  alignas(1024) uint8_t keys[2][Tile::kChunks][Tile::kChunkBytes];
  float row_max[2][kRow], row_sum[2][kRow];  // of each warpgroup's KV tiles
  Barrier queries_full, queries_empty, queries_rope_empty;
  Barrier weights_full[2];  // of each warpgroup, for the other one
  Barrier first_scores;     // of a segment have been computed
  Barrier consumers;        // ConsumerSync
  Barrier keys_full[2][Tile::kPieces];
  Barrier rope_empty[2], half_empty[2][2];  // half_empty[stage][half]
  Planner<typename Tile::List, Tile::kNumWarps> planner;
  Segment segments[2];  // by turns; queries_full says that one is complete
  bool is_last;
};

}  // namespace kernelcat

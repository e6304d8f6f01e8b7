// What the blocks of flashmla/wgmma work on: tiles of tokens, their shared memory, and whose they
// are.
#pragma once

#include <kernelcat/mbarrier.cuh>
#include <kernelcat/wgmma.cuh>

#include "gathered_rows.cuh"
#include "latent.cuh"
#include "segments.cuh"

namespace kernelcat {

// 64 rows against 64 tokens at a time; kRowTiles blocks side by side have neighbouring rows of the
// same tokens, which they load together if they are a cluster.
template <typename T_, int kPageSize_, int kRowTiles_, int kClusterSize_>
struct LatentTile {
  using T = T_;
  using Cached = T_;
  static constexpr int BLOCK_M = kWgmmaM, BLOCK_N = 64;
  static constexpr int kPageSize = kPageSize_, kRowTiles = kRowTiles_;
  static constexpr int kSide = kRowTiles;  // blocks of a share
  static constexpr int kClusterSize = kClusterSize_;
  static constexpr bool kGathers = kPageSize == 1;                 // by cp.async; else by TMA
  static constexpr int kArrivals = kGathers ? kGatherThreads : 1;  // when keys have landed
  static constexpr int kConsumerThreads = 2 * kWarpgroupThreads;
  static constexpr int kNumThreads = kConsumerThreads + kWarpgroupThreads;
  static constexpr int kNumWarps = kNumThreads / kWarpThreads;
  static constexpr int kProducerRegisters = kGathers ? 56 : 40;
  static constexpr int kConsumerRegisters = kGathers ? 224 : 232;
  static constexpr int kColumns = kRowBytes / 2;  // of a chunk
  static constexpr int kValueChunks = kLatent / kColumns, kChunks = kValueChunks + 1;
  static constexpr int kHalfChunks = kValueChunks / 2;
  static constexpr int kChunkBytes = BLOCK_N * kRowBytes;
  // Keys land piece by piece: the rotated part, then pairs of chunks.
  static constexpr int kPieceChunks = 2, kPieces = 1 + kValueChunks / kPieceChunks;
  static constexpr int kLoadedTokens = BLOCK_N / kClusterSize;  // of a tile, by each block
  // A box of a tensor map lies within a page.
  static constexpr int kBoxTokens = kLoadedTokens < kPageSize ? kLoadedTokens : kPageSize;
  static constexpr int kBoxes = kLoadedTokens / kBoxTokens;
  using List = WorkList<BLOCK_M * kRowTiles, BLOCK_N>;
  static_assert(kGathers || (kBoxTokens % 8 == 0 && kBoxes <= kWarpThreads));
  static_assert(kRowTiles % kClusterSize == 0);

  // Chunks of the columns that warpgroup `half` sums come first in its own tiles.
  static __device__ __forceinline__ int chunk(int half, int piece, int i) {
    const int index = (piece - 1) * kPieceChunks + i;
    return (half * kHalfChunks + index) % kValueChunks;
  }
};

// Tiles of tokens take turns with the stages; warpgroup s has the scores of stage s.
template <typename Tile>
struct LatentShared {
  static constexpr int kRow = Tile::BLOCK_M;
  alignas(1024) uint8_t queries[Tile::kValueChunks][Tile::kChunkBytes];
  // Of each warpgroup's tile; the first holds the queries' rotated part before there are weights.
  alignas(1024) uint8_t weights[2][Tile::kChunkBytes];
  alignas(1024) uint8_t keys[2][Tile::kChunks][Tile::kChunkBytes];
  float most[2][kRow], totals[2][kRow];
  Barrier queries_full, queries_empty, queries_rope_empty;
  Barrier weights_full[2];  // each warpgroup's, for the other one
  Barrier first_scores;     // of a segment are there
  Barrier meeting;          // of both
  Barrier keys_full[2][Tile::kPieces];
  Barrier rope_empty[2], half_empty[2][2];  // half_empty[stage][half]
  Planner<typename Tile::List, Tile::kNumWarps> planner;
  Segment segments[2];  // the latest: queries_full says that it is there
  bool is_last;
};

}  // namespace kernelcat

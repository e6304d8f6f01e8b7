// What the two blocks of a cluster of flashmla/pair work on: 128 rows, 64 tokens at a time, of
// which each block has half of the columns.
#pragma once

#include <kernelcat/mbarrier.cuh>
#include <kernelcat/wgmma.cuh>

#include "latent.cuh"
#include "segments.cuh"

namespace kernelcat {

template <typename A, typename B>
constexpr bool same_type = false;
template <typename A>
constexpr bool same_type<A, A> = true;

// kWarpgroups have rows; with one, there are 64 rows, and the first block has the softmax of all.
template <typename T_, typename Cached_, int kPageSize_, int kWarpgroups_>
struct PairTile {
  using T = T_;
  using Cached = Cached_;
  // Float8 rows become 16-bit numbers in shared memory, by the warps beside the one that loads.
  static constexpr bool kPacked = !same_type<T, Cached>;
  static constexpr int kWarpgroups = kWarpgroups_, kWarpgroupRows = kWgmmaM;
  static constexpr int BLOCK_M = kWarpgroups * kWarpgroupRows, BLOCK_N = 64;
  static constexpr int kPageSize = kPageSize_, kRowTiles = 1;
  static constexpr int kSide = 2;  // blocks of a share: the cluster's
  static constexpr int kNumStages = 3;
  static constexpr int kConsumerThreads = kWarpgroups * kWarpgroupThreads;
  static constexpr int kNumThreads = 3 * kWarpgroupThreads;  // the last warpgroup loads
  static constexpr int kNumWarps = kNumThreads / kWarpThreads;
  static constexpr int kProducerRegisters = kPacked ? 72 : 40;
  static constexpr int kConsumerRegisters = kPacked ? 216 : 232;
  static constexpr int kColumns = kRowBytes / 2;                   // of a chunk
  static constexpr int kValueChunks = kLatent / kSide / kColumns;  // of the block's half
  static constexpr int kRopeChunk = kValueChunks, kChunks = kValueChunks + 1;
  static constexpr int kChunkBytes = BLOCK_N * kRowBytes;
  static constexpr int kBoxTokens = BLOCK_N < kPageSize ? BLOCK_N : kPageSize;
  static constexpr int kBoxes = BLOCK_N / kBoxTokens;  // of a chunk: each lies within a page
  using List = WorkList<BLOCK_M, BLOCK_N>;
  static_assert(kChunks * kBoxes <= kWarpThreads, "a lane loads a box");
};

// Warpgroup w has rows 64 * w ..; those of the warpgroup of the block's rank are the block's own,
// of which it has the softmax.
template <typename Tile>
struct PairShared {
  static constexpr int kThreads = kWarpgroupThreads;
  alignas(1024) uint8_t queries[2][Tile::kValueChunks][Tile::kChunkBytes];
  alignas(1024) uint8_t queries_rope[Tile::kChunkBytes];  // of the own rows
  alignas(1024) uint8_t keys[Tile::kNumStages][Tile::kChunks][Tile::kChunkBytes];
  // What the other block sends, a thread to the same of its warpgroup: scores of the own rows by
  // its columns, and weights of its rows with their largest scores and totals.
  float4 scores[Tile::BLOCK_N / 8][kThreads];
  uint4 weights[Tile::BLOCK_N / 16][kThreads];
  float4 sums[kThreads];
  float4 scales[Tile::kPacked ? Tile::kNumStages : 1][Tile::BLOCK_N];  // of packed rows
  Barrier queries_full, queries_empty, meeting;
  Barrier keys_full[Tile::kNumStages], keys_empty[Tile::kNumStages];
  Barrier packed_full[Tile::kPacked ? Tile::kNumStages : 1];  // rows have landed as they are cached
  Barrier scores_full, weights_full;                          // here
  Barrier scores_empty, weights_empty;  // there: what this block sends next finds room
  Planner<typename Tile::List, Tile::kNumWarps> planner;
  Segment segments[2];  // the latest: queries_full says that it is there
  bool is_last;
};

}  // namespace kernelcat

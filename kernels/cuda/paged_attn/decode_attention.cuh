// What a thread block of paged_attn/tma does.
#pragma once

#include <kernelcat/pdl.cuh>
#include <kernelcat/prefetch.cuh>
#include <kernelcat/remote_store.cuh>

#include "decode_merge.cuh"
#include "decode_span.cuh"
#include "decode_warp.cuh"
#include "tensor_load.cuh"

namespace kernelcat {

template <typename Kind, int kHeads, int kRowTiles, int kTokens, int kNumWarps, int kNumStages,
          int kClusterSize>
struct DecodeAttention {
  using T = typename Kind::T;
  using Warp = DecodeWarp<Kind, kHeads, kRowTiles, kTokens>;
  static constexpr int kThreads = kNumWarps * kWarpThreads;
  static constexpr int kBoxTokens = kTokens < Kind::kPageSize ? kTokens : Kind::kPageSize;
  static constexpr int kBoxes = kTokens / kBoxTokens;
  static constexpr int kStageBytes = 2 * Warp::kTileBytes;
  static constexpr int kRingBytes = kNumStages * kStageBytes;
  // Accumulators replace the warps' stages.
  using Merge = DecodeMerge<Kind, kHeads, kRowTiles, kNumWarps, kClusterSize, kRingBytes>;
  using Rows = typename Merge::Rows;
  static_assert(kBoxTokens % 8 == 0);
  static_assert(kNumStages * kBoxes <= kWarpThreads, "each lane loads one box of a stage");

  struct Shared {
    alignas(1024) uint8_t rings[kNumWarps][kRingBytes];
    typename Merge::Shared merge;
    Barrier full[kNumWarps][kNumStages];
    Barrier inbox_full;
  };

  const AttentionArgs<Kind>& args;
  const TensorMap &map_k, &map_v;
  int num_slots;  // of the cache
  Shared& shared;
  int warp_idx, lane, rank;

  // The first slot of the lane's box of a KV tile. A box that no query sees begins beyond the end
  // of the cache, where TMA loads zeros. `table` is (table_width,) of the sequence.
  __device__ __forceinline__ int slot_of(const int* table, int tile, const TokenSpan& span) const {
    const uint32_t token = tile * kTokens + lane % kBoxes * kBoxTokens;
    const uint32_t entry = min(token / Kind::kPageSize, args.table_width - 1u);
    const int slot = table[entry] * Kind::kPageSize + token % Kind::kPageSize;
    const bool is_visible = token < span.end_token && token + kBoxTokens > span.first_token;
    return is_visible ? slot : num_slots;
  }

  __device__ __forceinline__ uint8_t* stage(int index) const {
    return shared.rings[warp_idx] + index * kStageBytes;
  }

  __device__ __forceinline__ void load_box(int stage_idx, int slot) const {
    uint8_t* box = stage(stage_idx) + lane % kBoxes * kBoxTokens * Warp::kSpan;
    Barrier& full = shared.full[warp_idx][stage_idx];
    const int heads = blockIdx.y;  // in units of kHeads, as in the tensor maps
#pragma unroll
    for (int chunk = 0; chunk < Warp::kChunks; ++chunk) {
      uint8_t* target = box + chunk * kTokens * Warp::kSpan;
      const int column = chunk * Warp::kChunkColumns;
      tensor_load_3d(target, map_k, column, heads, slot, full);
      tensor_load_3d(target + Warp::kTileBytes, map_v, column, heads, slot, full);
    }
  }

  // Every thread block of the cluster receives every kClusterSize-th chunk of vectors from all,
  // adds the parts up and stores the sum.
  __device__ __forceinline__ void exchange(const Rows& rows) const {
    cluster_wait();  // all inbox_full barriers are initialised
    for (int i = threadIdx.x; i < rows.num_vectors(); i += kThreads) {
      const PartialSum sum = Merge::sum_of_warps(shared.merge, shared.rings[0], rows, i);
      Merge::send(shared.merge.inbox[rank], sum, i, shared.inbox_full);
    }
    shared.inbox_full.wait(0);
    for (int vector = threadIdx.x; vector < Merge::kInboxVectors; vector += kThreads) {
      const int i = Merge::received_vector(vector, rank);
      if (i >= rows.num_vectors()) continue;
      rows.store(args, i, Merge::sum_of_received(shared.merge, vector));
    }
  }

  __device__ __forceinline__ void run() const {
    Barrier* full = shared.full[warp_idx];
    if (lane < kNumStages) full[lane].init(1);
    fence_barrier_init();
    if constexpr (kClusterSize > 1) Merge::init_inbox(shared.inbox_full);
    const int sequence_idx = blockIdx.z;
    const int* table = args.block_table + static_cast<int64_t>(sequence_idx) * args.table_width;
    prefetch(table, sequence_idx);
    __syncwarp();
    grid_dependency_wait();
    launch_dependents();

    const TokenSpan span = visible_span(args, sequence_idx);
    const int end_tile = ceil_div(span.end_token, kTokens);
    // All warps of the cluster take tiles in turn.
    constexpr int kStep = kClusterSize * kNumWarps;
    int tile = span.first_token / kTokens + rank * kNumWarps + warp_idx;
    const int lane_stage = lane / kBoxes;   // the stage of which the lane loads a box
    int next = tile + lane_stage * kStep;   // the tile that the lane loads next
    int slot = slot_of(table, next, span);  // looked up a whole round of the ring ahead
    if (lane_stage < kNumStages && next < end_tile && lane % kBoxes == 0) {
      full[lane_stage].arrive_expect(kStageBytes);
    }
    __syncwarp();
    const auto load = [&] {
      if (next < end_tile) load_box(lane_stage, slot);
      next += kNumStages * kStep;
      if (next < end_tile) slot = slot_of(table, next, span);
    };
    if (lane_stage < kNumStages) load();

    const Sequence& sequence = span.sequence;
    if (sequence.num_queries <= 0) return;  // the same in the whole cluster
    const int first_head = static_cast<int>(blockIdx.y) * kHeads;
    const Rows rows = {
        .first = {.first_query = sequence.first_query, .first_row = 0, .kv_head = first_head},
        .per_head = sequence.num_queries * args.group()};
    if constexpr (kClusterSize > 1) Merge::expect_inbox(rows, shared.inbox_full, rank);
    Warp warp;
    warp.begin(args, rows.first, rows.per_head, sequence);
    // All rows see tokens [all_begin, all_end).
    const int all_begin = Kind::kWindow ? span.end_token - args.window : 0;
    const int all_end = sequence.context() + 1;
    PipelineState<kNumStages> state;
    for (; tile < end_tile; tile += kStep) {
      const int token = tile * kTokens;
      const bool is_masked = token + kTokens > all_end || (Kind::kWindow && token < all_begin);
      full[state.stage].wait(state.phase);
      if (is_masked) {
        warp.clear_values(stage(state.stage), token, span.first_token, span.end_token);
      }
      warp.attend(shared_address(stage(state.stage)), token, is_masked, args);
      __syncwarp();
      if (tile + kNumStages * kStep < end_tile) {
        if (lane == state.stage * kBoxes) full[state.stage].arrive_expect(kStageBytes);
        __syncwarp();
        if (lane_stage == state.stage) load();
      }
      state.advance();
    }
    warp.reduce_row_sums();
    Merge::store_accumulators(shared.merge, shared.rings[warp_idx], warp, warp_idx, lane);
    __syncthreads();
    if constexpr (kClusterSize > 1) {
      exchange(rows);
    } else {
      for (int i = threadIdx.x; i < rows.num_vectors(); i += kThreads) {
        rows.store(args, i, Merge::sum_of_warps(shared.merge, shared.rings[0], rows, i));
      }
    }
  }

 private:
  // Brings what is read first into L2 before grid_dependency_wait(). `table` is (table_width,).
  __device__ __forceinline__ void prefetch(const int* table, int sequence_idx) const {
    constexpr int kSector = 8;  // entries in 32 bytes
    if (threadIdx.x == 0) {
      prefetch_map(map_k);
      prefetch_map(map_v);
      prefetch_l2(args.kv_lens + sequence_idx);
      prefetch_l2(args.cu_q + sequence_idx);
    }
    const int entry = (rank * kThreads + static_cast<int>(threadIdx.x)) * kSector;
    if (!Kind::kWindow && entry < args.table_width) prefetch_l2(table + entry);
  }
};

}  // namespace kernelcat

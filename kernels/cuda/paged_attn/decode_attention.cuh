// What a thread block of paged_attn/tma does.
#pragma once

#include <kernelcat/pdl.cuh>
#include <kernelcat/prefetch.cuh>
#include <kernelcat/remote_store.cuh>

#include "decode_warp.cuh"
#include "tensor_load.cuh"

namespace kernelcat {

// Partial results of the same four columns of a row.
template <int kParts>
struct Parts {
  PartialSum parts[kParts];

  __device__ __forceinline__ PartialSum sum() const {
    PartialSum sum;
#pragma unroll
    for (const PartialSum& part : parts) sum.row_max = fmaxf(sum.row_max, part.row_max);
#pragma unroll
    for (const PartialSum& part : parts) {
      const float weight = rescale_factor(part.row_max, sum.row_max);
      sum.values.x += weight * part.values.x;
      sum.values.y += weight * part.values.y;
      sum.values.z += weight * part.values.z;
      sum.values.w += weight * part.values.w;
      sum.row_sum += weight * part.row_sum;
    }
    return sum;
  }
};

template <typename Kind, int kHeads, int kRowTiles, int kTokens, int kNumWarps, int kNumStages,
          int kClusterSize>
struct DecodeAttention {
  using T = typename Kind::T;
  using Warp = DecodeWarp<Kind, kHeads, kRowTiles, kTokens>;
  static constexpr int kHeadDim = Kind::kHeadDim, kThreads = kNumWarps * kWarpThreads;
  static constexpr int kBoxTokens = Warp::kBoxTokens, kBoxes = Warp::kBoxes;
  static constexpr int kStageBytes = 2 * Warp::kTileBytes;
  static constexpr int kRingBytes = kNumStages * kStageBytes;
  static constexpr int kMaxRows = 8 * Warp::kGroups;
  static constexpr int kVectors = kHeadDim / 4;  // of four columns, of a row
  static constexpr int kPitch = kHeadDim + 4;    // floats; rows lie in different banks
  // Neighbouring vectors that the same thread block of the cluster adds up and stores.
  static constexpr int kChunk = 4;
  static constexpr int kInboxVectors = ceil_div(kMaxRows * kVectors, kChunk* kClusterSize) * kChunk;
  static_assert(kNumStages * kBoxes <= kWarpThreads, "each lane loads one box of a stage");
  static_assert(kMaxRows * kPitch * 4 <= kRingBytes, "accumulators replace the warp's stages");

  // The rows of all kHeads heads, head after head.
  struct Rows {
    TileRows<Kind> first;  // of the first head
    int per_head;

    __device__ __forceinline__ int num_vectors() const { return kHeads * per_head * kVectors; }
    __device__ __forceinline__ int head(int row) const { return kHeads > 1 ? row / per_head : 0; }
    // The row of a warp's accumulators, where each head has 8 * kRowTiles rows.
    __device__ __forceinline__ int accumulator_row(int row) const {
      return row + head(row) * (8 * kRowTiles - per_head);
    }
    // Stores vector `i` of all rows.
    __device__ __forceinline__ void store(const AttentionArgs<Kind>& args, int i,
                                          const PartialSum& sum) const {
      const int row = i / kVectors, h = head(row);
      first.of_head(h).store(args, row - h * per_head, i % kVectors * 4, sum);
    }
  };

  // A vector that a thread block of the cluster sends.
  struct Received {
    float4 values, stats;  // stats: row_max, row_sum
  };
  struct Shared {
    alignas(1024) uint8_t rings[kNumWarps][kRingBytes];
    Received inbox[kClusterSize > 1 ? kClusterSize : 1][kClusterSize > 1 ? kInboxVectors : 1];
    float row_max[kNumWarps][kMaxRows], row_sum[kNumWarps][kMaxRows];
    Barrier full[kNumWarps][kNumStages];
    Barrier inbox_full;
  };

  const AttentionArgs<Kind>& args;
  const TensorMap &map_k, &map_v;
  int num_slots;  // of the cache
  Shared& shared;
  int warp_idx, lane, rank;

  // A sequence, and the tokens that some query of it sees.
  struct Span {
    Sequence sequence;
    int first_token, end_token;

    __device__ __forceinline__ int first_tile() const { return first_token / kTokens; }
    __device__ __forceinline__ int end_tile() const { return ceil_div(end_token, kTokens); }
  };
  __device__ __forceinline__ Span span_of(int sequence_idx) const {
    const int first_query = args.cu_q[sequence_idx];
    const int num_queries = args.cu_q[sequence_idx + 1] - first_query;
    const Sequence sequence = {.first_query = first_query,
                               .num_queries = num_queries,
                               .num_tokens = args.kv_lens[sequence_idx]};
    return {.sequence = sequence,
            .first_token = Kind::kWindow ? max(sequence.context() + 1 - args.window, 0) : 0,
            .end_token = num_queries > 0 ? max(sequence.num_tokens, 0) : 0};
  }

  // The first slot of the lane's box of a KV tile. A box that no query sees begins beyond the end
  // of the cache, where TMA loads zeros. `table` is (table_width,) of the sequence.
  __device__ __forceinline__ int slot_of(const int* table, int tile, const Span& span) const {
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

  // Stores the warp's accumulators over its stages.
  __device__ __forceinline__ void store_accumulators(const Warp& warp) const {
    float* rows = reinterpret_cast<float*>(shared.rings[warp_idx]);
#pragma unroll
    for (int g = 0; g < Warp::kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = 8 * g + lane % 4 * 2 + j;
        if (lane < 4) {
          shared.row_max[warp_idx][row] = warp.row_max[g][j];
          shared.row_sum[warp_idx][row] = warp.row_sum[g][j];
        }
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            rows[row * kPitch + Warp::column(step, half)] =
                warp.accumulators[step][g][2 * half + j];
          }
        }
      }
    }
  }

  // Vector `i` of all rows, of all warps.
  __device__ __forceinline__ PartialSum sum_of_warps(const Rows& rows, int i) const {
    const int row = rows.accumulator_row(i / kVectors), vector = i % kVectors;
    Parts<kNumWarps> found;
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) {
      const float* values = reinterpret_cast<const float*>(shared.rings[w]);
      found.parts[w] = {
          .values = *reinterpret_cast<const float4*>(values + row * kPitch + 4 * vector),
          .row_max = shared.row_max[w][row],
          .row_sum = shared.row_sum[w][row]};
    }
    return found.sum();
  }

  // Every thread block of the cluster receives every kClusterSize-th chunk of vectors from all,
  // adds the parts up and stores the sum.
  __device__ __forceinline__ void exchange(const Rows& rows) const {
    cluster_wait();  // all inbox_full barriers are initialised
    for (int i = threadIdx.x; i < rows.num_vectors(); i += kThreads) {
      const PartialSum sum = sum_of_warps(rows, i);
      const int chunk = i / kChunk, cta = chunk % kClusterSize;
      Received& target = shared.inbox[rank][chunk / kClusterSize * kChunk + i % kChunk];
      store_remote(&target.values, sum.values, shared.inbox_full, cta);
      store_remote(&target.stats, float4{sum.row_max, sum.row_sum, 0.0f, 0.0f}, shared.inbox_full,
                   cta);
    }
    shared.inbox_full.wait(0);
    for (int vector = threadIdx.x; vector < kInboxVectors; vector += kThreads) {
      const int i = (vector / kChunk * kClusterSize + rank) * kChunk + vector % kChunk;
      if (i >= rows.num_vectors()) continue;
      Parts<kClusterSize> found;
#pragma unroll
      for (int cta = 0; cta < kClusterSize; ++cta) {
        const Received& part = shared.inbox[cta][vector];
        found.parts[cta] = {
            .values = part.values, .row_max = part.stats.x, .row_sum = part.stats.y};
      }
      rows.store(args, i, found.sum());
    }
  }

  __device__ __forceinline__ void init_inbox() const {
    if (threadIdx.x == 0) {
      shared.inbox_full.init(1);
      fence_barrier_init();
    }
    cluster_arrive_relaxed();
  }

  // Sets how many bytes this thread block receives, which inbox_full waits for.
  __device__ __forceinline__ void expect_inbox(const Rows& rows) const {
    if (threadIdx.x != 0) return;
    const int chunks = rows.num_vectors() / kChunk;
    const int received_chunks = (chunks + kClusterSize - 1 - rank) / kClusterSize;
    shared.inbox_full.arrive_expect(received_chunks * kChunk * kClusterSize * sizeof(Received));
  }

  __device__ __forceinline__ void run() const {
    Barrier* full = shared.full[warp_idx];
    if (lane < kNumStages) full[lane].init(1);
    fence_barrier_init();
    if constexpr (kClusterSize > 1) init_inbox();
    const int sequence_idx = blockIdx.z;
    const int* table = args.block_table + static_cast<int64_t>(sequence_idx) * args.table_width;
    prefetch(table, sequence_idx);
    __syncwarp();
    grid_dependency_wait();
    launch_dependents();

    const Span span = span_of(sequence_idx);
    const int end_tile = span.end_tile();
    // All warps of the cluster take tiles in turn.
    constexpr int kStep = kClusterSize * kNumWarps;
    int tile = span.first_tile() + rank * kNumWarps + warp_idx;
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
    if constexpr (kClusterSize > 1) expect_inbox(rows);
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
    store_accumulators(warp);
    __syncthreads();
    if constexpr (kClusterSize > 1) {
      exchange(rows);
    } else {
      for (int i = threadIdx.x; i < rows.num_vectors(); i += kThreads) {
        rows.store(args, i, sum_of_warps(rows, i));
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

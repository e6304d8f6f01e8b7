// What a thread block of paged_attn/registers and of paged_attn/staged does: each warp takes whole
// KV tiles, and warps wait for each other only once, at the end.
#pragma once

#include <kernelcat/pdl.cuh>
#include <kernelcat/prefetch.cuh>

#include "decode_merge.cuh"
#include "decode_span.cuh"
#include "lane_merge.cuh"
#include "quick_row_end.cuh"

namespace kernelcat {

// `kGroup` query heads share a key-value head. `Warp` says where the keys and values of a warp's
// tile lie: in registers (RegisterWarp), or in a stage of Warp::kStageBytes (StagedWarp).
template <typename Kind, typename Warp, int kGroup, int kNumWarps, int kClusterSize>
struct TileAttention {
  static constexpr int kThreads = kNumWarps * kWarpThreads;
  static constexpr int kRowTiles = Warp::kGroups, kTokens = 16 * Warp::kTokenSteps;
  // A warp's accumulators replace its stage.
  static constexpr int kSumBytes = 8 * kRowTiles * (Kind::kHeadDim + 4) * 4;
  static constexpr int kWarpBytes = kSumBytes > Warp::kStageBytes ? kSumBytes : Warp::kStageBytes;
  using Merge = DecodeMerge<Kind, 1, kRowTiles, kNumWarps, kClusterSize, kWarpBytes>;
  using Rows = typename Merge::Rows;
  // With a window, the length says which entries of the block table are needed. A row of up to
  // kTableEntries is copied in the meantime.
  static constexpr int kTableLoads = 4;  // of each thread
  static constexpr int kTableEntries = kTableLoads * kThreads;
  static_assert(kGroup <= kThreads);

  struct Shared {
    alignas(Warp::kStageAlignment) uint8_t warps[kNumWarps][kWarpBytes];
    typename Merge::Shared merge;
    int table[Kind::kWindow ? kTableEntries : 1];
    float sinks[Kind::kSinks ? kGroup : 1];
    Barrier inbox_full;
  };

  const AttentionArgs<Kind>& args;
  Shared& shared;
  int warp_idx, lane, rank;

  // Calls `ahead()` before grid_dependency_wait(), when it has asked for the block table.
  template <typename Ahead>
  __device__ __forceinline__ void run(Ahead ahead) const {
    if constexpr (kClusterSize > 1) Merge::init_inbox(shared.inbox_full);
    const int sequence_idx = blockIdx.z, kv_head = blockIdx.y;
    const int* table = args.block_table + static_cast<int64_t>(sequence_idx) * args.table_width;
    prefetch(table, sequence_idx, kv_head);
    ahead();
    grid_dependency_wait();
    launch_dependents();

    int entries[kTableLoads];
    if constexpr (Kind::kWindow) load_table(entries, table);
    const TokenSpan span = visible_span(args, sequence_idx);
    // All warps of the cluster take tiles in turn, neighbouring tiles in different thread blocks.
    constexpr int kStep = kClusterSize * kNumWarps * kTokens;
    int token = span.first_token + (rank + kClusterSize * warp_idx) * kTokens;
    int pages[Warp::kLaneTokens], slots[Warp::kLaneTokens];
    if constexpr (Kind::kWindow) {
      store_table(entries);
      __syncthreads();
    }
    look_up(pages, table, token);

    // A sequence without queries has no rows and no visible tokens. To return would make the first
    // loads of all others wait for cu_q.
    Warp warp;
    place(slots, pages, token, span.end_token);
    if constexpr (!Warp::kQueriesFirst)
      warp.load(args, kv_head, slots, span.end_token - token, stage());
    const Sequence& sequence = span.sequence;
    const Rows rows = {
        .first = {.first_query = sequence.first_query, .first_row = 0, .kv_head = kv_head},
        .per_head = sequence.num_queries * kGroup};
    if constexpr (kClusterSize > 1) Merge::expect_inbox(rows, shared.inbox_full, rank);
    warp.begin(args, rows.first, rows.per_head, sequence);
    if constexpr (Warp::kQueriesFirst)
      warp.load(args, kv_head, slots, span.end_token - token, stage());
    if (Kind::kSinks && threadIdx.x < kGroup) {
      shared.sinks[threadIdx.x] = args.sinks[kv_head * kGroup + threadIdx.x];
    }
    // All rows see tokens [all_begin, all_end).
    const int all_begin = Kind::kWindow ? span.end_token - args.window : 0;
    const int all_end = sequence.context() + 1;
    while (true) {
      const bool is_masked = token + kTokens > all_end || (Kind::kWindow && token < all_begin);
      warp.attend(token, is_masked, args, stage());
      token += kStep;
      if (token >= span.end_token) break;
      look_up(pages, table, token);
      place(slots, pages, token, span.end_token);
      warp.load(args, kv_head, slots, span.end_token - token, stage());
    }
    warp.reduce_row_sums();
    if constexpr (Warp::kStageBytes > 0) __syncwarp();  // all lanes have read the stage
    Merge::store_accumulators(shared.merge, stage(), warp, warp_idx, lane);
    __syncthreads();
    if constexpr (Warp::kSharesMerge) {
      merge_by_lanes(rows);
    } else if constexpr (kClusterSize > 1) {
      exchange(rows);
    } else {
      for (int i = threadIdx.x; i < rows.num_vectors(); i += kThreads) {
        store(rows, i, Merge::sum_of_warps(shared.merge, shared.warps[0], rows, i));
      }
    }
  }

 private:
  // The warp's stage, and later its accumulators.
  __device__ __forceinline__ uint8_t* stage() const { return shared.warps[warp_idx]; }

  // Brings what is read first into L2 before grid_dependency_wait(), one address a thread: length
  // and start of the sequence, the sinks, sectors of `table`, (table_width,).
  __device__ __forceinline__ void prefetch(const int* table, int sequence_idx, int kv_head) const {
    constexpr int kSector = 8, kOthers = 3;  // entries in 32 bytes; addresses outside the table
    const int thread = threadIdx.x, sector = rank * (kThreads - kOthers) + thread - kOthers;
    const void* address = table + sector * kSector;
    if (thread == 0 || !Kind::kSinks && thread == 2) address = args.kv_lens + sequence_idx;
    if (thread == 1) address = args.cu_q + sequence_idx;
    if (Kind::kSinks && thread == 2) address = args.sinks + kv_head * kGroup;
    if (thread < kOthers || sector * kSector < args.table_width) prefetch_l2(address);
  }

  // The thread's entries of the first kTableEntries of `table`, (table_width,).
  __device__ __forceinline__ void load_table(int (&entries)[kTableLoads], const int* table) const {
#pragma unroll
    for (int i = 0; i < kTableLoads; ++i) {
      const int entry = threadIdx.x + i * kThreads;
      entries[i] = entry < args.table_width ? table[entry] : 0;
    }
  }

  __device__ __forceinline__ void store_table(const int (&entries)[kTableLoads]) const {
#pragma unroll
    for (int i = 0; i < kTableLoads; ++i) shared.table[threadIdx.x + i * kThreads] = entries[i];
  }

  // The pages of tokens token + l, token + l + 32 .. in lane l: of as many as a tile has. Entries
  // beyond the last page of the sequence are looked up, and not followed.
  __device__ __forceinline__ void look_up(int (&pages)[Warp::kLaneTokens], const int* table,
                                          int token) const {
#pragma unroll
    for (int i = 0; i < Warp::kLaneTokens; ++i) {
      const uint32_t lane_token = token + lane + i * kWarpThreads;
      const uint32_t entry = min(lane_token / Kind::kPageSize, args.table_width - 1u);
      if (Kind::kWindow && args.table_width <= kTableEntries) {
        pages[i] = shared.table[entry];
      } else {
        pages[i] = table[entry];
      }
    }
  }

  // The slots of these tokens, or kInvisible.
  __device__ __forceinline__ void place(int (&slots)[Warp::kLaneTokens],
                                        const int (&pages)[Warp::kLaneTokens], int token,
                                        int end_token) const {
#pragma unroll
    for (int i = 0; i < Warp::kLaneTokens; ++i) {
      const int lane_token = token + lane + i * kWarpThreads;
      const int slot = static_cast<uint32_t>(pages[i]) * Kind::kPageSize +
                       static_cast<uint32_t>(lane_token) % Kind::kPageSize;
      slots[i] = lane_token < end_token ? slot : kInvisible;
    }
  }

  __device__ __forceinline__ void exchange(const Rows& rows) const {
    cluster_wait();  // all inbox_full barriers are initialised
    for (int i = threadIdx.x; i < rows.num_vectors(); i += kThreads) {
      const PartialSum sum = Merge::sum_of_warps(shared.merge, shared.warps[0], rows, i);
      Merge::send(shared.merge.inbox[rank], sum, i, shared.inbox_full);
    }
    shared.inbox_full.wait(0);
    for (int vector = threadIdx.x; vector < Merge::kInboxVectors; vector += kThreads) {
      const int i = Merge::received_vector(vector, rank);
      if (i < rows.num_vectors()) store(rows, i, Merge::sum_of_received(shared.merge, vector));
    }
  }

  // exchange() and the sum of the warps, by several lanes a vector.
  __device__ __forceinline__ void merge_by_lanes(const Rows& rows) const {
    constexpr int kLanes = kThreads >= 2 * Merge::kMaxRows * Rows::kVectors ? 2 : 1;
    using Warps = LaneMerge<Merge, kLanes>;
    if constexpr (kClusterSize > 1) cluster_wait();  // all inbox_full barriers are initialised
    // Lanes beyond the last vector join in, because others of their warp shuffle.
    const int num_vectors = rows.num_vectors(), last = max(num_vectors - 1, 0);
    const int end = ceil_div(num_vectors, Warps::kVectors) * Warps::kVectors;
    for (int i = Warps::first_vector(); i < end; i += Warps::kStep) {
      const PartialSum sum = Warps::template sum_of_warps<kNumWarps>(
          shared.merge, shared.warps[0], kWarpBytes, rows, min(i, last));
      if (i >= num_vectors) continue;
      if constexpr (kClusterSize > 1 && kLanes == 1) {
        Merge::send(shared.merge.inbox[rank], sum, i, shared.inbox_full);
      } else if constexpr (kClusterSize > 1) {
        Merge::send_part(shared.merge.inbox[rank], sum, i, Warps::share(), shared.inbox_full);
      } else if (Warps::share() == 0) {
        quick_store(rows, i, sum);
      }
    }
    if constexpr (kClusterSize > 1) receive_by_lanes(rows);
  }

  __device__ __forceinline__ void receive_by_lanes(const Rows& rows) const {
    using Blocks = LaneMerge < Merge, kClusterSize<4 ? kClusterSize : 4>;
    constexpr int kEnd = ceil_div(Merge::kInboxVectors, Blocks::kVectors) * Blocks::kVectors;
    shared.inbox_full.wait(0);
    for (int vector = Blocks::first_vector(); vector < kEnd; vector += Blocks::kStep) {
      const PartialSum sum = Blocks::template sum_of_received<kClusterSize>(
          shared.merge, min(vector, Merge::kInboxVectors - 1));
      const int i = Merge::received_vector(vector, rank);
      if (vector < Merge::kInboxVectors && i < rows.num_vectors() && Blocks::share() == 0) {
        quick_store(rows, i, sum);
      }
    }
  }

  __device__ __forceinline__ void quick_store(const Rows& rows, int i,
                                              const PartialSum& sum) const {
    const uint32_t row = static_cast<uint32_t>(i) / Rows::kVectors;
    const int column = static_cast<uint32_t>(i) % Rows::kVectors * 4;
    const float sink = Kind::kSinks ? shared.sinks[row % kGroup] : -kInfinity;
    const RowEnd end = quick_row_end(sum.row_max, sum.row_sum, sink);
    rows.first.store(args, rows.first.index(args, row), column, sum, end);
  }

  // Stores vector `i` of all rows. A sink of -infinity counts as none.
  __device__ __forceinline__ void store(const Rows& rows, int i, const PartialSum& sum) const {
    const uint32_t row = static_cast<uint32_t>(i) / Rows::kVectors;
    const int column = static_cast<uint32_t>(i) % Rows::kVectors * 4;
    const float sink = Kind::kSinks ? shared.sinks[row % kGroup] : -kInfinity;
    const RowEnd end = sink == -kInfinity ? RowEnd::of(sum.row_max, sum.row_sum)
                                          : RowEnd::with_sink(sum.row_max, sum.row_sum, sink);
    rows.first.store(args, rows.first.index(args, row), column, sum, end);
  }
};

}  // namespace kernelcat

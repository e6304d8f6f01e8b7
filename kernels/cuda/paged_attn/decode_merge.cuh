// How the partial results of a thread block's warps, and those of the thread blocks of a cluster,
// become rows of the output (flash-decoding): through shared memory, then through distributed
// shared memory.
#pragma once

#include <kernelcat/remote_store.cuh>

#include "tile_rows.cuh"

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

// The rows of all kHeads heads, head after head, as vectors of four columns.
template <typename Kind, int kHeads, int kRowTiles>
struct DecodeRows {
  static constexpr int kVectors = Kind::kHeadDim / 4;  // of a row
  TileRows<Kind> first;                                // of the first head
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

// `accumulators` are (kNumWarps, kWarpBytes) in shared memory, of each warp (kMaxRows, kPitch)
// floats. Where a cluster has several thread blocks, each has an inbox for the parts of all of
// them, and `inbox_full` completes when they are here; `rank` is the thread block's in the cluster.
template <typename Kind, int kHeads, int kRowTiles, int kNumWarps, int kClusterSize, int kWarpBytes>
struct DecodeMerge {
  using Rows = DecodeRows<Kind, kHeads, kRowTiles>;
  static constexpr int kHeadDim = Kind::kHeadDim, kThreads = kNumWarps * kWarpThreads;
  static constexpr int kMaxRows = 8 * kHeads * kRowTiles, kVectors = Rows::kVectors;
  static constexpr int kPitch = kHeadDim + 4;  // floats; rows lie in different banks
  // Neighbouring vectors that the same thread block of the cluster adds up and stores.
  static constexpr int kChunk = 4;
  static constexpr int kInboxVectors = ceil_div(kMaxRows * kVectors, kChunk* kClusterSize) * kChunk;
  static_assert(kMaxRows * kPitch * 4 <= kWarpBytes, "the accumulators of a warp have no room");

  // A vector that a thread block of the cluster sends.
  struct Received {
    float4 values, stats;  // stats: row_max, row_sum
  };
  struct Shared {
    Received inbox[kClusterSize > 1 ? kClusterSize : 1][kClusterSize > 1 ? kInboxVectors : 1];
    float row_max[kNumWarps][kMaxRows], row_sum[kNumWarps][kMaxRows];
  };

  // Stores the accumulators of a warp, whose row sums have been reduced.
  template <typename Warp>
  static __device__ __forceinline__ void store_accumulators(Shared& shared, void* accumulators,
                                                            const Warp& warp, int warp_idx,
                                                            int lane) {
    float* rows = reinterpret_cast<float*>(accumulators);
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
  static __device__ __forceinline__ PartialSum sum_of_warps(const Shared& shared,
                                                            const uint8_t* accumulators,
                                                            const Rows& rows, int i) {
    const int row = rows.accumulator_row(i / kVectors), vector = i % kVectors;
    Parts<kNumWarps> found;
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) {
      const float* values = reinterpret_cast<const float*>(accumulators + w * kWarpBytes);
      found.parts[w] = {
          .values = *reinterpret_cast<const float4*>(values + row * kPitch + 4 * vector),
          .row_max = shared.row_max[w][row],
          .row_sum = shared.row_sum[w][row]};
    }
    return found.sum();
  }

  // Begins the exchange; all threads of the cluster call it together.
  static __device__ __forceinline__ void init_inbox(Barrier& inbox_full) {
    if (threadIdx.x == 0) {
      inbox_full.init(1);
      fence_barrier_init();
    }
    cluster_arrive_relaxed();
  }

  // Sets how many bytes this thread block receives, which inbox_full waits for.
  static __device__ __forceinline__ void expect_inbox(const Rows& rows, Barrier& inbox_full,
                                                      int rank) {
    if (threadIdx.x != 0) return;
    const int chunks = rows.num_vectors() / kChunk;
    const int received_chunks = (chunks + kClusterSize - 1 - rank) / kClusterSize;
    inbox_full.arrive_expect(received_chunks * kChunk * kClusterSize * sizeof(Received));
  }

  // Sends vector `i` of all rows, a sum of this thread block's warps, to the thread block that adds
  // up the cluster's: each one has every kClusterSize-th chunk of vectors. `inbox` is where that
  // thread block expects parts of this one.
  static __device__ __forceinline__ void send(Received* inbox, const PartialSum& sum, int i,
                                              Barrier& inbox_full) {
    const int chunk = i / kChunk, cta = chunk % kClusterSize;
    Received& target = inbox[chunk / kClusterSize * kChunk + i % kChunk];
    store_remote(&target.values, sum.values, inbox_full, cta);
    store_remote(&target.stats, float4{sum.row_max, sum.row_sum, 0.0f, 0.0f}, inbox_full, cta);
  }

  // The same by two lanes: one for the values (`half` 0), one for row_max and row_sum (1).
  static __device__ __forceinline__ void send_part(Received* inbox, const PartialSum& sum, int i,
                                                   int half, Barrier& inbox_full) {
    const int chunk = i / kChunk, cta = chunk % kClusterSize;
    Received& target = inbox[chunk / kClusterSize * kChunk + i % kChunk];
    const float4 stats = {sum.row_max, sum.row_sum, 0.0f, 0.0f};
    store_remote(half == 0 ? &target.values : &target.stats, half == 0 ? sum.values : stats,
                 inbox_full, cta);
  }

  // The vector of all rows that is number `vector` in this thread block's inbox.
  static __device__ __forceinline__ int received_vector(int vector, int rank) {
    return (vector / kChunk * kClusterSize + rank) * kChunk + vector % kChunk;
  }

  // Vector `vector` of the inbox, of all thread blocks of the cluster.
  static __device__ __forceinline__ PartialSum sum_of_received(const Shared& shared, int vector) {
    Parts<kClusterSize> found;
#pragma unroll
    for (int cta = 0; cta < kClusterSize; ++cta) {
      const Received& part = shared.inbox[cta][vector];
      found.parts[cta] = {.values = part.values, .row_max = part.stats.x, .row_sum = part.stats.y};
    }
    return found.sum();
  }
};

}  // namespace kernelcat

// Adds up the partial sums of a work item: first those of a thread block's warps that split k, then
// those of the thread blocks of a cluster, each of which finishes a part of the work item.
#pragma once

#include <kernelcat/remote_store.cuh>

#include "output.cuh"

namespace kernelcat {

constexpr int kQuad = 4;  // sums that a thread adds up at a time: a row of A, four rows of W

// Floats from one row of A to the next in a warp's sums of a tile. A row has 16 floats, one for
// each row of W; the rest is padding, so that the lanes of a store write to different banks.
constexpr int kSumsPitch = 20;

__device__ __forceinline__ float4 operator+(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// Finishes columns `col` to `col` + 3 of row `row` of the product, whose sums are multiplied by
// `scale`, and stores the results in D.
template <typename Output>
__device__ __forceinline__ void finish(const Output& output, const float4& sums, float scale,
                                       int row, int col) {
  using T = typename Output::T;
  scale = output.row_scale(scale, row);
  float z[kQuad] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
  for (int i = 0; i < kQuad; ++i) z[i] = z[i] * scale + output.bias_at(col + i);
  constexpr int kValues = Output::kPaired ? 2 : 4;
  float values[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if constexpr (Output::kPaired) {
      values[i] = Output::gated(z[2 * i], z[2 * i + 1]);
    } else {
      values[i] = Output::activated(z[i]);
    }
  }
  const int d_cols = output.d_cols(), d_col = Output::kPaired ? col / 2 : col;
  T* address = output.d + static_cast<int64_t>(row) * d_cols + d_col;
  if (d_col + kValues <= d_cols && is_aligned(address, 2 * kValues)) {
    uint32_t* words = reinterpret_cast<uint32_t*>(address);
    if constexpr (Output::kPaired) {
      *words = pack<T>(values[0], values[1]);
    } else {
      *reinterpret_cast<uint2*>(words) = {pack<T>(values[0], values[1]),
                                          pack<T>(values[2], values[3])};
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (d_col + i < d_cols) address[i] = from_float<T>(values[i]);
  }
}

// The shared memory of a thread block: partial sums of its warps, and partial sums that the thread
// blocks of the cluster send each other, in two buffers that work items use alternately. No barrier
// protects a buffer from being overwritten: a thread block writes into the buffers of the others
// again only two work items later. By then it has received all their sums of the work item between,
// which they send only after they have read the buffer. Therefore every thread block must finish
// some sums of every work item.
template <int kTiles, int kSlices, int kCluster>
struct ClusterSum {
  float* partials;   // [kSlices][kTiles][m][kSumsPitch]
  float4* received;  // [2][kCluster][quads of a work item / kCluster, rounded up]
  Barrier* arrived;  // [2]
  int m;             // rows of A

  __device__ __forceinline__ int num_quads() const { return m * kTiles * kQuad; }

  // Stores a warp's 16 x 8 sums: tile row `tile` of W by rows `first` to `first` + 7 of A.
  __device__ __forceinline__ void put(int slice, int tile, int first, const float (&sums)[4]) {
    const int lane = lane_index();
    float* target = partials + static_cast<int64_t>((slice * kTiles + tile) * m) * kSumsPitch;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + lane % 4 * 2 + i % 2;
      if (row < m) target[row * kSumsPitch + i / 2 * 8 + lane / 4] = sums[i];
    }
  }

  // The sum, over this thread block's warps, of quad `q` of a work item: rows 4 * (q % 4) and the
  // next three of tile q / 4 % kTiles, for row q / 4 / kTiles of A.
  __device__ __forceinline__ float4 block_sum(int q) const {
    const int tile = q / kQuad % kTiles, row = q / kQuad / kTiles;
    const float* first = partials + (tile * m + row) * kSumsPitch + q % kQuad * kQuad;
    float4 sum = *reinterpret_cast<const float4*>(first);
#pragma unroll
    for (int s = 1; s < kSlices; ++s) {
      sum = sum + *reinterpret_cast<const float4*>(first + s * kTiles * m * kSumsPitch);
    }
    return sum;
  }

  // Calls function(quad, row of A, first row of W in the work item) for the quads that this thread
  // block finishes. `count` is the number of work items before this one. All threads call this,
  // after a barrier that follows put().
  template <typename Function>
  __device__ __forceinline__ void for_each(int count, int rank, Function function) {
    const auto call = [&](int q, const float4& sum) {
      function(sum, q / kQuad / kTiles, q % (kQuad * kTiles) * kQuad);
    };
    if constexpr (kCluster == 1) {
      for (int q = threadIdx.x; q < num_quads(); q += blockDim.x) call(q, block_sum(q));
      return;
    }
    const int max_owned = ceil_div(num_quads(), kCluster), buffer = count % 2;
    float4* sums = received + buffer * kCluster * max_owned;
    const int num_owned = ceil_div(num_quads() - rank, kCluster);
    if (threadIdx.x == 0) {
      arrived[buffer].arrive_expect((kCluster - 1) * num_owned * sizeof(float4));
    }
    for (int q = threadIdx.x; q < num_quads(); q += blockDim.x) {
      const int owner = q % kCluster;
      float4* target = sums + rank * max_owned + q / kCluster;
      const float4 sum = block_sum(q);
      if (owner == rank) {
        *target = sum;
      } else {
        store_remote(target, sum, arrived[buffer], owner);
      }
    }
    arrived[buffer].wait(count / 2 % 2);
    for (int q = threadIdx.x; q < num_quads(); q += blockDim.x) {
      if (q % kCluster != rank) continue;
      float4 sum = sums[q / kCluster];
#pragma unroll
      for (int from = 1; from < kCluster; ++from) sum = sum + sums[from * max_owned + q / kCluster];
      call(q, sum);
    }
  }
};

}  // namespace kernelcat

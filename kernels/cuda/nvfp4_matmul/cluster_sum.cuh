// Adding up a unit's sums: of the warps that split k, then of the blocks of a cluster, of which
// each finishes its part of the unit.
#pragma once

#include <kernelcat/remote_store.cuh>

#include "output.cuh"

namespace kernelcat {

constexpr int kQuad = 4;  // rows of W that a thread adds up at a time

// A warp's sums of a 16-row tile lie in rows of 16, one a row of A; 20 apart, so that lanes of a
// store fall into different banks.
constexpr int kSumsPitch = 20;

__device__ __forceinline__ float4 operator+(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// Columns `col` to `col` + 3 of a row of the product; sums are multiplied by `scale`.
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

// What a block needs for it: its warps' sums, and what the blocks of the cluster send each other,
// in two buffers. A block fills a buffer again only after it got everybody's sums of the unit
// between, which each sends when it has read the buffer; so every block must own some of a unit.
template <int kTiles, int kSlices, int kCluster>
struct ClusterSum {
  float* partials;   // [kSlices][kTiles][m][kSumsPitch]
  float4* received;  // [2][kCluster][quads of a unit / kCluster, rounded up]
  Barrier* arrived;  // [2]
  int m;

  __device__ __forceinline__ int num_quads() const { return m * kTiles * kQuad; }

  // The 16 x 8 sums of rows `first` to `first` + 7 of A.
  __device__ __forceinline__ void put(int slice, int tile, int first, const float (&sums)[4]) {
    const int lane = lane_index();
    float* own = partials + static_cast<int64_t>((slice * kTiles + tile) * m) * kSumsPitch;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + lane % 4 * 2 + i % 2;
      if (row < m) own[row * kSumsPitch + i / 2 * 8 + lane / 4] = sums[i];
    }
  }

  // Quad `q` of a unit: rows 4 * (q % 4) and on of tile q / 4 % kTiles, for row q / 4 / kTiles of
  // A.
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

  // Calls function(sum, row of A, row of W in the unit) for what this block finishes of unit
  // `count`, counted from 0. All threads call it, after a barrier that follows put().
  template <typename Function>
  __device__ __forceinline__ void for_each(int count, int rank, Function function) {
    const auto call = [&](int q, const float4& sum) {
      function(sum, q / kQuad / kTiles, q % (kQuad * kTiles) * kQuad);
    };
    if constexpr (kCluster == 1) {
      for (int q = threadIdx.x; q < num_quads(); q += blockDim.x) call(q, block_sum(q));
      return;
    }
    const int each = ceil_div(num_quads(), kCluster), buffer = count % 2;
    float4* sums = received + buffer * kCluster * each;
    const int own = ceil_div(num_quads() - rank, kCluster);
    if (threadIdx.x == 0) arrived[buffer].arrive_expect((kCluster - 1) * own * sizeof(float4));
    for (int q = threadIdx.x; q < num_quads(); q += blockDim.x) {
      const int owner = q % kCluster;
      float4* place = sums + rank * each + q / kCluster;
      const float4 sum = block_sum(q);
      if (owner == rank) {
        *place = sum;
      } else {
        store_remote(place, sum, arrived[buffer], owner);
      }
    }
    arrived[buffer].wait(count / 2 % 2);
    for (int q = threadIdx.x; q < num_quads(); q += blockDim.x) {
      if (q % kCluster != rank) continue;
      float4 sum = sums[q / kCluster];
#pragma unroll
      for (int from = 1; from < kCluster; ++from) sum = sum + sums[from * each + q / kCluster];
      call(q, sum);
    }
  }
};

}  // namespace kernelcat

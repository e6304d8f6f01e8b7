// What several blocks found of the same rows: where they leave it, and how it is put together.
#pragma once

#include <kernelcat/sync.cuh>

#include "latent.cuh"

namespace kernelcat {

constexpr int kPartRows = 64;  // of a block
constexpr int kHalf = kLatent / 2;

// Lane l of a warp has, of rows l / 4 and l / 4 + 8 of its 16, what wgmma leaves it. `most` is the
// largest score in base 2, `total` the sum of the exponentials relative to it.
struct RowSums {
  float most[2] = {-kInfinity, -kInfinity}, total[2] = {};
};

// What sums relative to older largest scores are multiplied by.
struct Weights {
  float own[2], other[2];
};

// Takes another part's sums in.
__device__ __forceinline__ Weights add(RowSums& rows, const RowSums& other) {
  Weights weights;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float most = fmaxf(rows.most[i], other.most[i]);
    weights.own[i] = rescale(rows.most[i], most);
    weights.other[i] = rescale(other.most[i], most);
    rows.total[i] = rows.total[i] * weights.own[i] + other.total[i] * weights.other[i];
    rows.most[i] = most;
  }
  return weights;
}

// Two columns of the upper row, then two of the lower.
__device__ __forceinline__ void add(float4& values, const float4& other, const Weights& weights) {
  values.x = values.x * weights.own[0] + other.x * weights.other[0];
  values.y = values.y * weights.own[0] + other.y * weights.other[0];
  values.z = values.z * weights.own[1] + other.z * weights.other[1];
  values.w = values.w * weights.own[1] + other.w * weights.other[1];
}

// Rows that so many shares have parts of that a kernel of its own puts them together.
struct alignas(16) Task {
  int num_parts;  // 0: there is nothing to do
  int first_row;  // among all (token, head)
  int num_rows;
};

// Two slots a share, since a tile of rows that it has in common with others can only be its first
// (slot 0: it goes on from the share before) or its last (slot 1: it begins here). A slot holds 64
// rows for each of the kRowTiles blocks of a share, in the order in which threads have them: units
// of two rows x two columns, those of 128 threads side by side.
template <int kRowTiles>
struct Partials {
  static constexpr int kUnits = kPartRows * kLatent / 4;
  static constexpr int64_t kSlotFloats = 4 * kUnits + 2 * kPartRows;
  float* memory;

  static __device__ __forceinline__ int slot(int share, bool begins_here, int rank) {
    return (2 * share + begins_here) * kRowTiles + rank;
  }
  // Of thread `thread` of the warpgroup that has half `half` of the columns.
  __device__ __forceinline__ float4* unit(int slot, int half, int step, int thread) const {
    float4* units = reinterpret_cast<float4*>(memory + slot * kSlotFloats);
    return units + (half * (kHalf / 8) + step) * kWarpgroupThreads + thread;
  }
  __device__ __forceinline__ float2* most_and_total(int slot, int row) const {
    return reinterpret_cast<float2*>(memory + slot * kSlotFloats + 4 * kUnits) + row;
  }
  // `row` is the upper one.
  __device__ __forceinline__ RowSums sums(int slot, int row) const {
    const float2 upper = __ldcg(most_and_total(slot, row));
    const float2 lower = __ldcg(most_and_total(slot, row + 8));
    return {{upper.x, lower.x}, {upper.y, lower.y}};
  }
};

}  // namespace kernelcat

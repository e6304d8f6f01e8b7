// Partial results of rows that several teams work on: where they lie in global memory, and how they
// are added up.
#pragma once

#include <kernelcat/sync.cuh>

#include "latent.cuh"

namespace kernelcat {

// Rows whose partial results flashmla_combine merges, because there are more than
// max_inline_parts.
struct alignas(16) CombineTask {
  int num_parts;  // 0: nothing to do
  int first_row;  // among all (token, head)
  int num_rows;
};

// Row maxima in base 2, and row sums relative to them, of kRows rows.
template <int kRows>
struct RowStats {
  float row_max[kRows], row_sum[kRows];

  __device__ __forceinline__ RowStats() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) row_max[i] = -kInfinity, row_sum[i] = 0.0f;
  }
};

// Factors that make two accumulators relative to the same row max.
template <int kRows>
struct RescaleFactors {
  float sum[kRows], part[kRows];
};

// Adds the statistics of another part to `sum`.
template <int kRows>
__device__ __forceinline__ RescaleFactors<kRows> add(RowStats<kRows>& sum,
                                                     const RowStats<kRows>& part) {
  RescaleFactors<kRows> factors;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float new_max = fmaxf(sum.row_max[i], part.row_max[i]);
    factors.sum[i] = rescale_factor(sum.row_max[i], new_max);
    factors.part[i] = rescale_factor(part.row_max[i], new_max);
    sum.row_sum[i] = sum.row_sum[i] * factors.sum[i] + part.row_sum[i] * factors.part[i];
    sum.row_max[i] = new_max;
  }
  return factors;
}

// Partial results in global memory. A team has two slots, because only its first and its last row
// tile can be shared with other teams: slot 0 is for a row tile that another team begins, slot 1
// for the one that this team begins. A slot holds kTileRows rows of 512 floats, then (row_max,
// row_sum) of each row.
template <int kTileRows>
struct PartialResults {
  static constexpr int64_t kSlotFloats = kTileRows * (kLatent + 2);
  float* slots;  // (2 * teams, kSlotFloats)

  static __device__ __forceinline__ int slot(int team, bool begins_here) {
    return 2 * team + begins_here;
  }
  __device__ __forceinline__ float* values(int slot, int row, int column) const {
    return slots + slot * kSlotFloats + row * kLatent + column;
  }
  __device__ __forceinline__ float2* row_stats(int slot, int row) const {
    return reinterpret_cast<float2*>(slots + slot * kSlotFloats + kTileRows * kLatent) + row;
  }
};

// Whether this is the last of `num_parts` to be stored. The threads that `sync()` synchronizes call
// it together after they have stored their part; `counter` is zero before and after.
template <typename Sync>
__device__ __forceinline__ bool is_last_part(uint32_t* counter, int num_parts, bool is_first_thread,
                                             bool* shared, Sync sync) {
  __threadfence();
  sync();
  if (is_first_thread) {
    *shared = atomicAdd(counter, 1) + 1 == num_parts;
    if (*shared) *counter = 0;
    __threadfence();
  }
  sync();
  return *shared;
}

}  // namespace kernelcat

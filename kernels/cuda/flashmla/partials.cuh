// What several blocks found of the same rows: where they leave it, and how it is put together.
#pragma once

#include <kernelcat/sync.cuh>

#include "latent.cuh"

namespace kernelcat {

// Rows that so many shares have parts of that a kernel of its own puts them together.
struct alignas(16) Task {
  int num_parts;  // 0: there is nothing to do
  int first_row;  // among all (token, head)
  int num_rows;
};

// Largest scores in base 2, and the sums of the exponentials relative to them, of kRows rows.
template <int kRows>
struct RowSums {
  float most[kRows], total[kRows];

  __device__ __forceinline__ RowSums() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) most[i] = -kInfinity, total[i] = 0.0f;
  }
};

// What sums relative to older largest scores are multiplied by.
template <int kRows>
struct Factors {
  float own[kRows], other[kRows];
};

// Takes another part's sums in.
template <int kRows>
__device__ __forceinline__ Factors<kRows> add(RowSums<kRows>& rows, const RowSums<kRows>& other) {
  Factors<kRows> factors;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float most = fmaxf(rows.most[i], other.most[i]);
    factors.own[i] = rescale_factor(rows.most[i], most);
    factors.other[i] = rescale_factor(other.most[i], most);
    rows.total[i] = rows.total[i] * factors.own[i] + other.total[i] * factors.other[i];
    rows.most[i] = most;
  }
  return factors;
}

// Two slots a share in global memory, since a tile of rows that it has in common with others can
// only be its first (slot 0: it goes on from the share before) or its last (slot 1: it begins
// here). A slot holds kTileRows rows of 512 sums, then the largest scores and totals.
template <int kTileRows>
struct Partials {
  static constexpr int64_t kSlotFloats = kTileRows * (kLatent + 2);
  float* memory;

  static __device__ __forceinline__ int slot(int share, bool begins_here) {
    return 2 * share + begins_here;
  }
  __device__ __forceinline__ float* at(int slot, int row, int column) const {
    return memory + slot * kSlotFloats + row * kLatent + column;
  }
  __device__ __forceinline__ float2* most_and_total(int slot, int row) const {
    return reinterpret_cast<float2*>(memory + slot * kSlotFloats + kTileRows * kLatent) + row;
  }
};

// Whether all `num_parts` of some rows are there: the threads that `sync()` waits for call it once
// they have put theirs. `counter` is zero before and after.
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

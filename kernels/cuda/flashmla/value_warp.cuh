// The value warps of flashmla/mma: each accumulates a quarter of the columns, and stores or merges
// them.
#pragma once

#include "kv_tile16.cuh"
#include "partial_results.cuh"

namespace kernelcat {

// Lane l has, of columns column(step, half), the accumulators of rows 2 * (l % 4) + {0, 1} of every
// 8 rows; weights and row statistics it has of rows l / 4.
template <typename T, typename Cached, int kGroups>
struct ValueWarp {
  using Keys = KvTile16<T, Cached>;
  using Value = typename Keys::Value;
  static constexpr int kSteps = kWarpColumns / 16;

  float accumulators[kSteps][kGroups][4];
  RowStats<kGroups> stats;
  int first_column;

  // The column that accumulators[step][..][2 * half + {0, 1}] belong to.
  __device__ __forceinline__ int column(int step, int half) const {
    const int row = lane_index() / 4;  // of mma.sync's
    return first_column + 16 * step + (Keys::kPacked ? 2 * row + half : row + 8 * half);
  }

  __device__ __forceinline__ void begin() {
    stats = RowStats<kGroups>();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int r = 0; r < kGroups; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) accumulators[step][r][j] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void attend(const Keys& keys,
                                         const TileWeights<kGroups>& tile_weights) {
    const int lane = lane_index(), token = lane % 4 * 2;
    float row_max[kGroups];
    bool grows = false;
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
      row_max[r] = tile_weights.row_max[8 * r + lane / 4];
      grows |= row_max[r] > stats.row_max[r];
    }
    // Most KV tiles do not raise a row max.
    if (__any_sync(0xffffffff, grows)) raise_row_max(row_max);
    float scales[4] = {1.0f, 1.0f, 1.0f, 1.0f};  // of tokens
    if constexpr (Keys::kPacked) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scales[j] = keys.scales(token + j % 2 + j / 2 * 8)[first_column / kScaleGroup];
      }
    }
    uint32_t b[kGroups][2];
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
      const float factor = rescale_factor(row_max[r], stats.row_max[r]);
      const float* weights = tile_weights.weights[8 * r + lane / 4] + token;
      const float2 low = *reinterpret_cast<const float2*>(weights);
      const float2 high = *reinterpret_cast<const float2*>(weights + 8);
      stats.row_sum[r] += factor * (low.x + low.y + high.x + high.y);
      b[r][0] = pack<Value>(low.x * factor * scales[0], low.y * factor * scales[1]);
      b[r][1] = pack<Value>(high.x * factor * scales[2], high.y * factor * scales[3]);
    }
    multiply(keys, b);
  }

  // Adds up the row sums of the four lanes that share a row, in all of them.
  __device__ __forceinline__ void reduce_row_sums() {
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
      stats.row_sum[r] += __shfl_xor_sync(0xffffffff, stats.row_sum[r], 1);
      stats.row_sum[r] += __shfl_xor_sync(0xffffffff, stats.row_sum[r], 2);
    }
  }

  // Divides by the softmax's denominators and stores; `out`: (num_rows, 512).
  __device__ __forceinline__ void store(T* out, float* lse, int num_rows) const {
    const int lane = lane_index();
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
      const int row = 8 * r + lane / 4;
      const bool is_inside = row < num_rows;
      const RowEnd end = RowEnd::of(stats.row_max[r], stats.row_sum[r]);
      if (first_column == 0 && is_inside && lane % 4 == 0) lse[row] = end.lse;
      const float low = of_accumulator_row(end.factor, 0), high = of_accumulator_row(end.factor, 1);
      T* target = out + static_cast<int64_t>(row) * kLatent + first_column;
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        uint32_t matrices[4];  // [step][half]: two columns of a row each
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = accumulators[step + i / 2][r] + i % 2 * 2;
          matrices[i] = transposed(pack<T>(pair[0] * low, pair[1] * high));
        }
        if constexpr (Keys::kPacked) {  // the halves are the even and the odd columns
#pragma unroll
          for (int i = 0; i < 4; i += 2) {
            const uint32_t even = matrices[i], odd = matrices[i + 1];
            const uint2 four = {__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632)};
            uint2* address = reinterpret_cast<uint2*>(target + 16 * step + 8 * i + lane % 4 * 4);
            if (is_inside) *address = four;
          }
        } else {
          const uint4 eight = gather_rows(matrices);
          if (is_inside) *reinterpret_cast<uint4*>(target + 16 * step + lane % 4 * 8) = eight;
        }
      }
    }
  }

  // Stores the warp's columns of a partial result into `num_rows` rows from `first` on of a slot.
  template <typename Partials>
  __device__ __forceinline__ void store_part(const Partials& partials, int slot, int first,
                                             int num_rows) const {
    const int lane = lane_index();
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = 8 * r + lane % 4 * 2 + j % 2;
        if (row >= num_rows) continue;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          __stcg(partials.values(slot, first + row, column(step, j / 2)), accumulators[step][r][j]);
        }
      }
      if (first_column == 0 && lane % 4 == 0 && 8 * r + lane / 4 < num_rows) {
        __stcg(partials.row_stats(slot, first + 8 * r + lane / 4),
               {stats.row_max[r], stats.row_sum[r]});
      }
    }
  }

  // Adds a partial result that store_part() has stored.
  template <typename Partials>
  __device__ __forceinline__ void add_part(const Partials& partials, int slot, int first,
                                           int num_rows) {
    const int lane = lane_index();
    RowStats<kGroups> part;
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
      if (8 * r + lane / 4 >= num_rows) continue;
      const float2 found = __ldcg(partials.row_stats(slot, first + 8 * r + lane / 4));
      part.row_max[r] = found.x, part.row_sum[r] = found.y;
    }
    const RescaleFactors<kGroups> factors = add(stats, part);
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = 8 * r + lane % 4 * 2 + j % 2;
        const float rescale = of_accumulator_row(factors.sum[r], j % 2);
        const float factor = of_accumulator_row(factors.part[r], j % 2);
        if (row >= num_rows) continue;
        float found[kSteps];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          found[step] = __ldcg(partials.values(slot, first + row, column(step, j / 2)));
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          accumulators[step][r][j] = accumulators[step][r][j] * rescale + found[step] * factor;
        }
      }
    }
  }

 private:
  // `value` of the lane that has the weights of the row of this lane's accumulators[..][..][j].
  static __device__ __forceinline__ float of_accumulator_row(float value, int j) {
    return __shfl_sync(0xffffffff, value, 4 * (lane_index() % 4 * 2 + j));
  }

  __device__ __forceinline__ void raise_row_max(const float (&row_max)[kGroups]) {
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
      const float new_max = fmaxf(stats.row_max[r], row_max[r]);
      const float rescale = rescale_factor(stats.row_max[r], new_max);
      stats.row_max[r] = new_max;
      stats.row_sum[r] *= rescale;
      const float factors[2] = {of_accumulator_row(rescale, 0), of_accumulator_row(rescale, 1)};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int j = 0; j < 4; ++j) accumulators[step][r][j] *= factors[j % 2];
      }
    }
  }

  __device__ __forceinline__ void multiply(const Keys& keys, const uint32_t (&b)[kGroups][2]) {
    constexpr int kStepColumns = Keys::kPacked ? 1 : 2;  // bytes of a column
    const int lane = lane_index();
    // The lane's matrix. Packed rows: tokens 0-7 and 8-15 of the first unit, then of the second.
    // Otherwise: both units of tokens 0-7, then of tokens 8-15.
    const int half = Keys::kPacked ? lane / 8 % 2 : lane / 16;
    const int unit = Keys::kPacked ? lane / 16 : lane / 8 % 2;
    const uint32_t first = shared_address(keys.chunks) + (8 * half + lane % 8) * kSpan +
                           first_column * kStepColumns / kSpan * (kTileTokens * kSpan);
#pragma unroll
    for (int pair = 0; pair < kWarpColumns * kStepColumns / 32; ++pair) {
      const uint32_t chunk = first + pair / 4 * (kTileTokens * kSpan);
      uint32_t words[4];
      load_matrices_transposed(words, chunk + swizzled_unit(2 * (pair % 4) + unit));
      if constexpr (Keys::kPacked) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // Two columns of two tokens: ordered by column, then by token.
          const uint32_t low = words[2 * i], high = words[2 * i + 1];
          const uint32_t a[4] = {widen<Value, 0x2404>(low), widen<Value, 0x3414>(low),
                                 widen<Value, 0x2404>(high), widen<Value, 0x3414>(high)};
          add_product(2 * pair + i, a, b);
        }
      } else {
        add_product(pair, words, b);
      }
    }
  }

  __device__ __forceinline__ void add_product(int step, const uint32_t (&a)[4],
                                              const uint32_t (&b)[kGroups][2]) {
#pragma unroll
    for (int r = 0; r < kGroups; ++r)
      mma_16x8x16<Value>(accumulators[step][r], a, b[r][0], b[r][1]);
  }
};

}  // namespace kernelcat

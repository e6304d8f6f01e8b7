// What the value warps of flashmla/mma do: sums of a quarter of the columns, and what becomes of
// them.
#pragma once

#include "partials.cuh"
#include "stream_unit.cuh"

namespace kernelcat {

// Lane l has, of columns column(step, half), the sums of rows 2 * (l % 4) and the next, of every 8
// rows; of weights, the largest scores and totals it has those of rows l / 4.
template <typename T, typename Cached, int kRowTiles>
struct ValueWarp {
  using Keys = Unit<T, Cached>;
  using Value = typename Keys::Value;
  static constexpr int kSteps = kWarpColumns / 16;

  float sums[kSteps][kRowTiles][4];
  RowSums<kRowTiles> rows;
  int first_column;

  // Which column of the row sums[step][..][2 * half ..] is.
  __device__ __forceinline__ int column(int step, int half) const {
    const int own = lane_index() / 4;
    return first_column + 16 * step + (Keys::kPacked ? 2 * own + half : own + 8 * half);
  }

  __device__ __forceinline__ void begin() {
    rows = RowSums<kRowTiles>();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[step][r][j] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void attend(const Keys& keys, const UnitWeights<kRowTiles>& told) {
    const int lane = lane_index(), token = lane % 4 * 2;
    float most[kRowTiles];
    bool grows = false;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      most[r] = told.most[8 * r + lane / 4];
      grows |= most[r] > rows.most[r];
    }
    // Once the largest scores have been seen, most units change no sum.
    if (__any_sync(0xffffffff, grows)) raise(most);
    float scales[4] = {1.0f, 1.0f, 1.0f, 1.0f};  // of tokens
    if constexpr (Keys::kPacked) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scales[j] = keys.scales(token + j % 2 + j / 2 * 8)[first_column / kScaleGroup];
      }
    }
    uint32_t b[kRowTiles][2];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const float factor = rescale_factor(most[r], rows.most[r]);
      const float* weights = told.weights[8 * r + lane / 4] + token;
      const float2 low = *reinterpret_cast<const float2*>(weights);
      const float2 high = *reinterpret_cast<const float2*>(weights + 8);
      rows.total[r] += factor * (low.x + low.y + high.x + high.y);
      b[r][0] = pack<Value>(low.x * factor * scales[0], low.y * factor * scales[1]);
      b[r][1] = pack<Value>(high.x * factor * scales[2], high.y * factor * scales[3]);
    }
    multiply(keys, b);
  }

  // The rows' totals, in all lanes of a row.
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      rows.total[r] += __shfl_xor_sync(0xffffffff, rows.total[r], 1);
      rows.total[r] += __shfl_xor_sync(0xffffffff, rows.total[r], 2);
    }
  }

  // Divides by the softmax's denominators and stores; `out`: (num_rows, 512).
  __device__ __forceinline__ void store(T* out, float* lse, int num_rows) const {
    const int lane = lane_index();
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const int row = 8 * r + lane / 4;
      const bool is_live = row < num_rows;
      const RowEnd end = RowEnd::of(rows.most[r], rows.total[r]);
      if (first_column == 0 && is_live && lane % 4 == 0) lse[row] = end.lse;
      const float low = of_sums(end.factor, 0), high = of_sums(end.factor, 1);
      T* target = out + static_cast<int64_t>(row) * kLatent + first_column;
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        uint32_t matrices[4];  // of each step's halves: a row's columns, two by two
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = sums[step + i / 2][r] + i % 2 * 2;
          matrices[i] = transposed(pack<T>(pair[0] * low, pair[1] * high));
        }
        if constexpr (Keys::kPacked) {  // halves are the even and the odd columns
#pragma unroll
          for (int i = 0; i < 4; i += 2) {
            const uint32_t even = matrices[i], odd = matrices[i + 1];
            const uint2 four = {__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632)};
            uint2* place = reinterpret_cast<uint2*>(target + 16 * step + 8 * i + lane % 4 * 4);
            if (is_live) *place = four;
          }
        } else {
          const uint4 eight = gather_rows(matrices);
          if (is_live) *reinterpret_cast<uint4*>(target + 16 * step + lane % 4 * 8) = eight;
        }
      }
    }
  }

  // Into a slot's rows `first` ..
  template <typename Partials>
  __device__ __forceinline__ void put(const Partials& partials, int slot, int first) const {
    const int lane = lane_index();
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int row = first + 8 * r + lane % 4 * 2 + j % 2;
          __stcg(partials.at(slot, row, column(step, j / 2)), sums[step][r][j]);
        }
      }
      if (first_column == 0 && lane % 4 == 0) {
        __stcg(partials.most_and_total(slot, first + 8 * r + lane / 4),
               {rows.most[r], rows.total[r]});
      }
    }
  }

  // Takes a part of what `put` left in.
  template <typename Partials>
  __device__ __forceinline__ void take(const Partials& partials, int slot, int first) {
    const int lane = lane_index();
    RowSums<kRowTiles> other;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const float2 found = __ldcg(partials.most_and_total(slot, first + 8 * r + lane / 4));
      other.most[r] = found.x, other.total[r] = found.y;
    }
    const Factors<kRowTiles> factors = add(rows, other);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = first + 8 * r + lane % 4 * 2 + j % 2;
        const float kept = of_sums(factors.own[r], j % 2);
        const float factor = of_sums(factors.other[r], j % 2);
        float found[kSteps];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          found[step] = __ldcg(partials.at(slot, row, column(step, j / 2)));
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          sums[step][r][j] = sums[step][r][j] * kept + found[step] * factor;
        }
      }
    }
  }

 private:
  // From the lane that has the weights of the row that this one's sums [.. + `j`] are of.
  static __device__ __forceinline__ float of_sums(float value, int j) {
    return __shfl_sync(0xffffffff, value, 4 * (lane_index() % 4 * 2 + j));
  }

  __device__ __forceinline__ void raise(const float (&most)[kRowTiles]) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const float new_most = fmaxf(rows.most[r], most[r]);
      const float kept = rescale_factor(rows.most[r], new_most);
      rows.most[r] = new_most;
      rows.total[r] *= kept;
      const float factors[2] = {of_sums(kept, 0), of_sums(kept, 1)};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[step][r][j] *= factors[j % 2];
      }
    }
  }

  __device__ __forceinline__ void multiply(const Keys& keys, const uint32_t (&b)[kRowTiles][2]) {
    constexpr int kStepColumns = Keys::kPacked ? 1 : 2;  // bytes of a column
    const int lane = lane_index();
    // Of packed rows, both halves of the tokens of a unit, then of the next; else both units of
    // half of the tokens.
    const int half = Keys::kPacked ? lane / 8 % 2 : lane / 16;
    const int unit = Keys::kPacked ? lane / 16 : lane / 8 % 2;
    const uint32_t first = shared_address(keys.chunks) + (8 * half + lane % 8) * kSpan +
                           first_column * kStepColumns / kSpan * (kUnitTokens * kSpan);
#pragma unroll
    for (int pair = 0; pair < kWarpColumns * kStepColumns / 32; ++pair) {
      const uint32_t chunk = first + pair / 4 * (kUnitTokens * kSpan);
      uint32_t words[4];
      load_matrices_transposed(words, chunk + swizzled_unit(2 * (pair % 4) + unit));
      if constexpr (Keys::kPacked) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // Two columns of two tokens: of the first column, then of the second.
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
                                              const uint32_t (&b)[kRowTiles][2]) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) mma_16x8x16<Value>(sums[step][r], a, b[r][0], b[r][1]);
  }
};

}  // namespace kernelcat

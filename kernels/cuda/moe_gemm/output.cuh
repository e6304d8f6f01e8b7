// The epilogue: accumulators become rows of D by stores of 16 bytes, or are added to tokens' sums.
#pragma once

#include <kernelcat/atomic_add.cuh>
#include <kernelcat/fragments.cuh>

#include "wgmma_tile.cuh"

namespace kernelcat {

// The result: rows of T, or with kAtomic float32 sums of tokens, whose `pitch` is a multiple of
// four elements.
template <typename Config>
struct ExpertOutput {
  using T = typename Config::T;
  static constexpr int kColsOfZ = kIsGated<Config::kGating> ? 2 : 1;  // of one column of the result

  void* rows;          // (rows, pitch), with kAtomic (tokens, pitch)
  const T* bias;       // (experts, n), or null
  const int* order;    // (rows,), read with kAtomic
  const float* gates;  // (rows,), by assignment, read with kAtomic
  uint32_t top_k;
  int n;  // columns of the product
  int pitch;
  bool is_aligned;  // whether every row begins at a multiple of 16 bytes

  __device__ __forceinline__ int cols() const { return n / kColsOfZ; }

  // Stores columns `col` to `col` + 7 of a row, `col` a multiple of 8. Columns outside are dropped.
  __device__ __forceinline__ void store(int row, int col, uint4 eight) const {
    if (col >= cols()) return;
    uint16_t* address = static_cast<uint16_t*>(rows) + static_cast<int64_t>(row) * pitch + col;
    if (is_aligned) {
      *reinterpret_cast<uint4*>(address) = eight;
      return;
    }
#pragma unroll 1
    for (int i = 0; i < 8 && col + i < cols(); ++i) {
      address[i] = static_cast<uint16_t>(eight.x);
      eight.x = __funnelshift_r(eight.x, eight.y, 16);
      eight.y = __funnelshift_r(eight.y, eight.z, 16);
      eight.z = __funnelshift_r(eight.z, eight.w, 16);
      eight.w >>= 16;
    }
  }

  // Adds columns `col` to `col` + 3 of the product's row to a token's sums, `col` a multiple of 4.
  // Columns from `pitch` on are dropped.
  __device__ __forceinline__ void add(int token, int col, float4 four) const {
    if (col >= pitch) return;
    atomic_add(static_cast<float*>(rows) + static_cast<int64_t>(token) * pitch + col, four);
  }

  // Sets rows [first, last) to zero, all thread blocks together: this thread is `thread` of
  // `num_threads` of its thread block.
  __device__ __forceinline__ void clear(int first, int last, int thread, int num_threads) const {
    const int64_t step = static_cast<int64_t>(gridDim.x) * num_threads * 8;
    const int64_t end = static_cast<int64_t>(last) * pitch;
    T* elements = static_cast<T*>(rows);
    for (int64_t i = static_cast<int64_t>(first) * pitch +
                     (static_cast<int64_t>(blockIdx.x) * num_threads + thread) * 8;
         i < end; i += step) {
      if (is_aligned) {
        *reinterpret_cast<uint4*>(elements + i) = uint4{};
      } else {
        for (int64_t j = i; j < min(i + 8, end); ++j) elements[j] = from_float<T>(0.0f);
      }
    }
  }
};

// The bias of a tile's columns. The constructor loads it into registers before the tile is
// multiplied, and store() moves it to shared memory afterwards.
template <int kCount>
struct TileBias {
  static constexpr int kPerThread = ceil_div(kCount, kWarpgroupThreads);
  float values[kPerThread];

  // `bias` (size,) or null.
  template <typename T>
  __device__ __forceinline__ TileBias(const T* bias, int first, int size) {
    for_each([&](int i, float& value) {
      value = bias != nullptr && first + i < size ? to_float(bias[first + i]) : 0.0f;
    });
  }

  // All threads of a warpgroup call this together; the values are visible to them afterwards.
  __device__ __forceinline__ void store(float (&shared)[kCount], int barrier) {
    named_barrier_sync(barrier, kWarpgroupThreads);  // the previous tile's values have been read
    for_each([&](int i, float& value) { shared[i] = value; });
    named_barrier_sync(barrier, kWarpgroupThreads);
  }

  template <typename Function>
  __device__ __forceinline__ void for_each(Function function) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int i = j * kWarpgroupThreads + threadIdx.x % kWarpgroupThreads;
      if (i < kCount) function(i, values[j]);
    }
  }
};

// This lane's sums of 8 x 8 matrix `block` of 64 rows of Z, plus the bias: its columns 2 (lane % 4)
// and the next one, of row lane / 4 (kHalf 0) or of the row 8 below (kHalf 1) of the warp's 16.
template <int kHalf, int kCols>
__device__ __forceinline__ float2 biased(const float (&sums)[kCols / 2], const float* bias,
                                         int block) {
  const float2 b = *reinterpret_cast<const float2*>(bias + block * 8 + lane_index() % 4 * 2);
  return {sums[block * 4 + kHalf * 2] + b.x, sums[block * 4 + kHalf * 2 + 1] + b.y};
}

// Four 8 x 8 matrices of the result, from matrix 4 * group on: whole rows of 16 bytes, lane l has
// row l / 4 of matrix l % 4.
template <typename Config, int kHalf>
__device__ __forceinline__ uint4 result_rows(const float (&sums)[Config::BLOCK_N / 2],
                                             const float* bias, int group) {
  using T = typename Config::T;
  constexpr int kCols = Config::BLOCK_N;
  uint32_t matrices[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int matrix = group * 4 + i;
    if constexpr (kIsGated<Config::kGating>) {
      const float2 left = biased<kHalf, kCols>(sums, bias, 2 * matrix);
      const float2 right = biased<kHalf, kCols>(sums, bias, 2 * matrix + 1);
      matrices[i] =
          pack<T>(gated<Config::kGating>(left.x, left.y), gated<Config::kGating>(right.x, right.y));
    } else {
      const float2 z = biased<kHalf, kCols>(sums, bias, matrix);
      matrices[i] = pack<T>(z.x, z.y);
    }
  }
  const uint4 words = gather_rows(matrices);
  if constexpr (!kIsGated<Config::kGating>) return words;
  // Word q has columns q and q + 4 of the row.
  return {__byte_perm(words.x, words.y, 0x5410), __byte_perm(words.z, words.w, 0x5410),
          __byte_perm(words.x, words.y, 0x7632), __byte_perm(words.z, words.w, 0x7632)};
}

// The place of a lane's results.
struct ResultPlace {
  int row, col;    // of the result; `col` is the tile's first one
  bool is_inside;  // whether the row is stored
  float gate;      // the row's weight in its token's sum, with kAtomic
};

// The place of row `row` of a tile, from column `col` of the result on.
template <typename Config>
__device__ __forceinline__ ResultPlace place_of(const ExpertOutput<Config>& output,
                                                const ExpertTile& tile, int row, int col) {
  ResultPlace place = {tile.row + row, col, row < tile.num_rows, 1.0f};
  if (Config::kAtomic && place.is_inside) {
    const int assignment = output.order[place.row];
    place.gate = output.gates[assignment];
    place.row = static_cast<uint32_t>(assignment) / output.top_k;
  }
  return place;
}

// Stores 32 columns of eight of each warp's 16 rows in 16 bits.
template <typename Config, int kHalf>
__device__ __forceinline__ void store_group(const float (&sums)[Config::BLOCK_N / 2],
                                            const ExpertOutput<Config>& output, const float* bias,
                                            const ResultPlace& place, int group) {
  const uint4 eight = result_rows<Config, kHalf>(sums, bias, group);
  if (place.is_inside) {
    output.store(place.row, place.col + group * 32 + lane_index() % 4 * 8, eight);
  }
}

// Adds 16 columns of eight of each warp's 16 rows to tokens' sums. Neighbouring lanes exchange
// pairs of columns, so that an even lane has four columns of matrix 2 * group, and an odd lane four
// of the next matrix.
template <typename Config, int kHalf>
__device__ __forceinline__ void add_group(const float (&sums)[Config::BLOCK_N / 2],
                                          const ExpertOutput<Config>& output, const float* bias,
                                          const ResultPlace& place, int group) {
  const int q = lane_index() % 4;
  const bool is_odd = q % 2 == 1;
  const float2 even = biased<kHalf, Config::BLOCK_N>(sums, bias, 2 * group);
  const float2 odd = biased<kHalf, Config::BLOCK_N>(sums, bias, 2 * group + 1);
  const float x = __shfl_xor_sync(0xffffffff, is_odd ? even.x : odd.x, 1);
  const float y = __shfl_xor_sync(0xffffffff, is_odd ? even.y : odd.y, 1);
  float4 four = is_odd ? float4{x, y, odd.x, odd.y} : float4{even.x, even.y, x, y};
  four = {place.gate * four.x, place.gate * four.y, place.gate * four.z, place.gate * four.w};
  if (place.is_inside) {
    output.add(place.row, place.col + group * 16 + is_odd * 8 + q / 2 * 4, four);
  }
}

// Stores a consumer's sums. `bias` is that of the tile's columns; `first_row` is the consumer's
// first row in the tile.
template <typename Config>
__device__ __forceinline__ void store_sums(const typename Config::Sums& sums,
                                           const ExpertOutput<Config>& output, const float* bias,
                                           const ExpertTile& tile, int first_row) {
  constexpr int kCols = Config::BLOCK_N / ExpertOutput<Config>::kColsOfZ;
  constexpr int kGroups = kCols / (Config::kAtomic ? 16 : 32);
  static_assert(kCols % 32 == 0);
  const int col = tile.col / ExpertOutput<Config>::kColsOfZ;
#pragma unroll
  for (int i = 0; i < Config::kNumWgmmas; ++i) {
    const int row = first_row + i * kWgmmaM + warp_index() % 4 * 16 + lane_index() / 4;
    const ResultPlace upper = place_of(output, tile, row, col);
    const ResultPlace lower = place_of(output, tile, row + 8, col);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if constexpr (Config::kAtomic) {
        add_group<Config, 0>(sums[i], output, bias, upper, group);
        add_group<Config, 1>(sums[i], output, bias, lower, group);
      } else {
        store_group<Config, 0>(sums[i], output, bias, upper, group);
        store_group<Config, 1>(sums[i], output, bias, lower, group);
      }
    }
  }
}

}  // namespace kernelcat

// The epilogue of the wgmma kernel: accumulators become D chunk after chunk, through shared memory.
//
// A warp writes its part of a chunk as 8 x 8 matrices by stmatrix, transposed where the tile is one
// of Z^T, so that rows of D are contiguous in either case. Matrices are numbered along the columns
// of the accumulators.
#pragma once

#include <kernelcat/mma.cuh>
#include <kernelcat/sync.cuh>

#include "wgmma_tile.cuh"

namespace kernelcat {

// Matrices that a warp writes: two for each 16 x 8 accumulators, or one where columns are paired.
template <typename Config>
constexpr int kNumMatrices = Config::kChunkSums / 4 / Config::kPair;

struct Position {
  int row, col;  // in the chunk
};

// The position at which row `i` of matrix `x` begins.
template <typename Config>
__device__ __forceinline__ Position matrix_row(int x, int i) {
  const int warp = warp_index() % 4;
  if constexpr (!Config::kSwap) return {warp * 16 + x % 2 * 8 + i, x / 2 * 8};
  if constexpr (Config::kPaired) return {x * 8 + i, warp * 8};
  return {x / 2 * 8 + i, warp * 16 + x % 2 * 8};
}

// This lane's two elements of the residual for matrix `x`, in the places of finished_sums(). `row`
// and `col` are the chunk's first in D.
template <typename Config>
__device__ __forceinline__ uint32_t residual_word(const typename Config::Output& output, int row,
                                                  int col, int x) {
  const int r = lane_index() / 4, q = lane_index() % 4;
  if constexpr (!Config::kSwap) {
    const Position at = matrix_row<Config>(x, r);
    row += at.row, col += at.col;
    if constexpr (!Config::kPaired) return output.residual_pair(row, col + 2 * q);
    return output.residual_at(row, col + q) | output.residual_at(row, col + q + 4) << 16;
  } else {
    const Position at = matrix_row<Config>(x, 2 * q);
    row += at.row, col += at.col + (Config::kPaired ? r / 2 + r % 2 * 4 : r);
    return output.residual_at(row, col) | output.residual_at(row + 1, col) << 16;
  }
}

// This lane's two values of matrix `x`, after bias and activation and before the residual. `first`
// is the chunk's first column of accumulators, and `bias` begins with the chunk's first column of
// Z.
//
// With r = lane / 4 and q = lane % 4: unpaired, the values are the two elements that stmatrix takes
// from this lane. Pairs of columns leave columns q and q + 4 of row r. Pairs of rows, one of which
// is in this lane and the other four lanes away, leave row r / 2 where r is even, and r / 2 + 4
// where odd.
template <typename Config>
__device__ __forceinline__ float2 finished_sums(const typename Config::Sums& sums, int first, int x,
                                                const typename Config::T* bias) {
  using T = typename Config::T;
  const int r = lane_index() / 4, q = lane_index() % 4;
  const auto bias_pair = [&](int col) {
    return unpack<T>(*reinterpret_cast<const uint32_t*>(bias + col));
  };
  const auto gated = [](float gate, float up) { return silu(gate) * up; };
  if constexpr (!Config::kPaired) {
    const float* z = &sums[first / 2 + x / 2 * 4 + x % 2 * 2];
    float2 b;
    if constexpr (Config::kSwap) {
      b.x = b.y = to_float(bias[warp_index() % 4 * 16 + x % 2 * 8 + r]);
    } else {
      b = bias_pair(x / 2 * 8 + 2 * q);
    }
    return {Config::Output::activated(z[0] + b.x), Config::Output::activated(z[1] + b.y)};
  } else if constexpr (!Config::kSwap) {
    const float* z = &sums[first / 2 + x / 2 * 8 + x % 2 * 2];
    const float2 low = bias_pair(x / 2 * 16 + 2 * q), high = bias_pair(x / 2 * 16 + 8 + 2 * q);
    return {gated(z[0] + low.x, z[1] + low.y), gated(z[4] + high.x, z[5] + high.y)};
  } else {
    const float* z = &sums[first / 2 + x * 4];
    const T* rows = bias + warp_index() % 4 * 16 + r;
    const float upper = to_float(rows[0]), lower = to_float(rows[8]);
    const float z0 = z[0] + upper, z1 = z[1] + upper, z2 = z[2] + lower, z3 = z[3] + lower;
    const bool is_odd = r % 2 == 1;
    const float received0 = __shfl_xor_sync(0xffffffff, is_odd ? z0 : z2, 4);
    const float received1 = __shfl_xor_sync(0xffffffff, is_odd ? z1 : z3, 4);
    return is_odd ? float2{gated(received0, z2), gated(received1, z3)}
                  : float2{gated(z0, received0), gated(z1, received1)};
  }
}

// Moves the words of finished_sums() to the lanes from which stmatrix takes them.
template <typename Config>
__device__ __forceinline__ uint32_t arranged(uint32_t word) {
  const int lane = lane_index(), r = lane / 4, q = lane % 4;
  if constexpr (!Config::kPaired) {
    return word;
  } else if constexpr (Config::kSwap) {
    return __shfl_sync(0xffffffff, word, (r % 4 * 2 + r / 4) * 4 + q);
  } else {
    const int source = r * 4 + q % 2 * 2;
    const uint32_t left = __shfl_sync(0xffffffff, word, source);
    const uint32_t right = __shfl_sync(0xffffffff, word, source + 1);
    return __byte_perm(left, right, q < 2 ? 0x5410 : 0x7632);
  }
}

template <typename Config>
__device__ __forceinline__ void load_residual(uint32_t (&words)[kNumMatrices<Config>],
                                              const typename Config::Output& output, Position at) {
  if constexpr (Config::kResidual) {
#pragma unroll
    for (int x = 0; x < kNumMatrices<Config>; ++x) {
      words[x] = residual_word<Config>(output, at.row, at.col, x);
    }
  }
}

template <typename Config>
__device__ __forceinline__ void write_chunk(uint8_t* chunk, const typename Config::Sums& sums,
                                            int first, const typename Config::T* bias,
                                            const uint32_t (&residual)[kNumMatrices<Config>]) {
  using T = typename Config::T;
  constexpr int kSpan = Config::kChunkCols * 2;
  constexpr int kStored = kNumMatrices<Config> % 4 == 0 ? 4 : 2;
  const int lane = lane_index();
#pragma unroll
  for (int x = 0; x < kNumMatrices<Config>; x += kStored) {
    uint32_t words[kStored];
#pragma unroll
    for (int i = 0; i < kStored; ++i) {
      float2 value = finished_sums<Config>(sums, first, x + i, bias);
      if constexpr (Config::kResidual) {
        const float2 more = unpack<T>(residual[x + i]);
        value.x += more.x, value.y += more.y;
      }
      words[i] = arranged<Config>(pack<T>(value.x, value.y));
    }
    const Position at = matrix_row<Config>(x + lane / 8 % kStored, lane % 8);
    const uint32_t offset = swizzled<kSpan>(at.row * kSpan + at.col * 2);
    store_matrices<Config::kSwap>(shared_address(chunk) + offset, words);
  }
}

// Copies a chunk to D by ordinary stores, where no tensor map can describe the rows of D.
template <typename Config>
__device__ __forceinline__ void drain_chunk(const uint8_t* chunk,
                                            const typename Config::Output& output, int row,
                                            int col) {
  constexpr int kSpan = Config::kChunkCols * 2, kPairsPerRow = Config::kChunkCols / 2;
  for (int i = threadIdx.x % kWarpgroupThreads; i < Config::kChunkRows * kPairsPerRow;
       i += kWarpgroupThreads) {
    const int chunk_row = i / kPairsPerRow, pair = i % kPairsPerRow;
    const uint8_t* address = chunk + swizzled<kSpan>(chunk_row * kSpan + pair * 4);
    output.store_pair(row + chunk_row, col + 2 * pair, *reinterpret_cast<const uint32_t*>(address));
  }
}

// Stores a consumer's accumulators through its two buffers. `row` and `col` are those of the first
// accumulator in Z, with kSwap in Z^T; `bias` is in shared memory. With kTmaStore one thread starts
// the stores, and the last ones complete while the next tile is computed.
template <typename Config>
__device__ __forceinline__ void store_tile(uint8_t (&chunks)[2][Config::kChunkBytes],
                                           const typename Config::Accumulators& sums,
                                           const TensorMap& map_d,
                                           const typename Config::Output& output,
                                           const typename Config::T* bias, int row, int col,
                                           int barrier) {
  constexpr int kNumChunks = Config::kNumWgmmas * Config::kChunksPerWgmma;
  const bool is_leader = threadIdx.x % kWarpgroupThreads == 0;
  const auto col_of = [](int i) {
    return min(i % Config::kChunksPerWgmma * Config::kChunkSums,
               Config::BLOCK_N - Config::kChunkSums);
  };
  const auto row_of = [](int i) { return i / Config::kChunksPerWgmma * kWgmmaM; };
  const auto position_of = [&](int i) -> Position {
    const int z_row = row + row_of(i), z_col = col + col_of(i);  // with kSwap of Z^T
    if constexpr (Config::kSwap) return {z_col, z_row / Config::kPair};
    return {z_row, z_col / Config::kPair};
  };
  uint32_t residual[2][kNumMatrices<Config>];
  load_residual<Config>(residual[0], output, position_of(0));
  // With an odd number of chunks a tile ends in the buffer in which the next tile begins.
  if (Config::kTmaStore && is_leader && kNumChunks % 2 == 1) wait_stores_read<0>();
#pragma unroll
  for (int i = 0; i < kNumChunks; ++i) {
    const Position at = position_of(i);
    uint8_t* chunk = chunks[i % 2];
    if (i + 1 < kNumChunks) {
      load_residual<Config>(residual[(i + 1) % 2], output, position_of(i + 1));
    }
    if (Config::kTmaStore && is_leader) wait_stores_read<1>();
    named_barrier_sync(barrier, kWarpgroupThreads);
    write_chunk<Config>(chunk, sums[i / Config::kChunksPerWgmma], col_of(i),
                        bias + (Config::kSwap ? row_of(i) : col_of(i)), residual[i % 2]);
    if (Config::kTmaStore) fence_async_shared();
    named_barrier_sync(barrier, kWarpgroupThreads);
    if constexpr (!Config::kTmaStore) {
      drain_chunk<Config>(chunk, output, at.row, at.col);
    } else if (is_leader) {
      if (at.row < output.m && at.col < output.d_cols()) {
        tensor_store(map_d, chunk, at.col, at.row, kDefaultPolicy);
      }
      commit_stores();
    }
  }
}

}  // namespace kernelcat

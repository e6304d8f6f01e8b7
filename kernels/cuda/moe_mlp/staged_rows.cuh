// Activations of a segment's assignments in shared memory, in the order of right operands: a chunk
// is 512 bytes for 8 rows, of which lane l reads 16 bytes, the operands of two steps of row l / 4.
#pragma once

#include <kernelcat/quantize.cuh>

#include "weight_unit.cuh"

namespace kernelcat {

constexpr int kChunkBytes = 512;

template <typename Unit, int kColTiles>
struct StagedRows {
  using T = typename Unit::T;
  static constexpr int kCols = kColTiles * 8;  // of the product: rows that are staged
  static constexpr int kUnitChunks = Unit::kCols / Unit::kChunkCols;

  uint8_t* chunks;  // (kColTiles, num_chunks, kChunkBytes)
  float* scales;    // (num_chunks / kUnitChunks, kCols), for float8 activations
  int num_chunks;   // of a row
  int k;

  // Stages row source(assignments[i]) of `rows` (any, k) as row i, for i < count. All warps of the
  // thread block call this; a barrier of the thread block must follow.
  template <typename Source>
  __device__ __forceinline__ void stage(const T* rows, const int* assignments, int count,
                                        Source source) const {
    constexpr int kChunks = Unit::kFp8Products ? kUnitChunks : 1;  // that a warp stages together
    constexpr int kBatch = Unit::kFp8Products ? 1 : 4;
    const int num_parts = num_chunks / kChunks, step = blockDim.x / kWarpThreads;
    for (int tile = 0; tile * 8 < count; ++tile) {
      const int row = tile * 8 + lane_index() / 4;
      const bool is_row = row < count;
      const int64_t first = is_row ? source(assignments[row]) * static_cast<int64_t>(k) : 0;
      for (int part = warp_index(); part < num_parts; part += step * kBatch) {
        uint4 values[kBatch][Unit::kFp8Products ? 4 : 1];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int chunk = (part + i * step) * kChunks;
          load(values[i], rows + first, chunk, is_row && chunk < num_chunks);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int chunk = (part + i * step) * kChunks;
          if (chunk < num_chunks) store(values[i], tile, chunk);
        }
      }
    }
  }

  // The first of the eight columns of vector `i` that this lane loads for a chunk.
  static __device__ __forceinline__ int column(int chunk, int i) {
    const int q = lane_index() % 4;
    if constexpr (Unit::kFp8Products) return (chunk + i / 2) * 64 + q * 16 + i % 2 * 8;
    if constexpr (Unit::kIsFp8) return chunk / 2 * 64 + q * 16 + chunk % 2 * 8;
    return chunk * 32 + q * 8;
  }

  template <int kVectors>
  __device__ __forceinline__ void load(uint4 (&values)[kVectors], const T* row, int chunk,
                                       bool is_row) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int col = column(chunk, i);
      values[i] = uint4{};
      if (is_row && col < k) values[i] = *reinterpret_cast<const uint4*>(row + col);
    }
  }

  __device__ __forceinline__ uint4* chunk_at(int tile, int chunk) const {
    return reinterpret_cast<uint4*>(chunks + (tile * num_chunks + chunk) * kChunkBytes);
  }

  // 16-bit operands.
  __device__ __forceinline__ void store(const uint4 (&values)[1], int tile, int chunk) const {
    uint32_t words[4] = {values[0].x, values[0].y, values[0].z, values[0].w};
    if constexpr (Unit::kHasPrescale) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = multiply_pairs<T>(words[i], 0x5d805d80);  // 2^60
    }
    uint4* target = chunk_at(tile, chunk);
    if constexpr (!Unit::kIsFp4) {
      target[lane_index()] = {words[0], words[1], words[2], words[3]};
    } else {
      // Pair i of the lane's four belongs to lane i of the row's four. Rows begin with different
      // pairs, so that the lanes write to different banks.
      const int lane = lane_index(), q = lane % 4, turn = lane / 8;
      const auto rotate = [&](bool is_needed, int by) {
        uint32_t old[4] = {words[0], words[1], words[2], words[3]};
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = is_needed ? old[(i + by) % 4] : old[i];
      };
      rotate(turn & 1, 1);
      rotate(turn & 2, 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        reinterpret_cast<uint32_t*>(target + lane / 4 * 4 + (i + turn) % 4)[q] = words[i];
      }
    }
  }

  // Float8 operands: quantizes 32 of a row's 128 columns; its four lanes have one scale.
  __device__ __forceinline__ void store(const uint4 (&values)[4], int tile, int chunk) const {
    float x[4][kVector], amax = kMinAmax;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        x[i][j] = to_float(reinterpret_cast<const T*>(&values[i])[j]);
        amax = fmaxf(amax, fabsf(x[i][j]));
      }
    }
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffff, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffff, amax, 2));
    const float inverse = inverse_of(amax);
    const auto four = [&](const float* v) {
      const uint32_t low = pack_e4m3(__fmul_rn(v[0], inverse), __fmul_rn(v[1], inverse));
      const uint32_t high = pack_e4m3(__fmul_rn(v[2], inverse), __fmul_rn(v[3], inverse));
      return low | high << 16;
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      chunk_at(tile, chunk + i)[lane_index()] = {four(x[2 * i]), four(x[2 * i] + 4),
                                                 four(x[2 * i + 1]), four(x[2 * i + 1] + 4)};
    }
    if (lane_index() % 4 == 0) {
      scales[chunk / kUnitChunks * kCols + tile * 8 + lane_index() / 4] = scale_of(amax);
    }
  }
};

}  // namespace kernelcat

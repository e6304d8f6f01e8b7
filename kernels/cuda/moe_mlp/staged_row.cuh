// Rows of activations for products of one token, in shared memory: all eight columns of a right
// operand are the same row, so a chunk has 64 bytes, of which all lanes with one lane % 4 read the
// same 16.
#pragma once

#include "staged_rows.cuh"

namespace kernelcat {

template <typename Unit>
struct StagedRow {
  using T = typename Unit::T;
  using Chunks = StagedRows<Unit, 1>;
  static_assert(!Unit::kFp8Products);
  static constexpr int kLaneChunks = 8;  // chunks that a warp loads together
  static constexpr int kRowChunkBytes = kChunkBytes / kLaneChunks;
  static constexpr int kUnitBytes = Unit::kCols / Unit::kChunkCols * kRowChunkBytes;

  uint8_t* chunks;  // (rows, row_chunks, kRowChunkBytes)
  int row_chunks;   // a multiple of kLaneChunks
  int k;

  __device__ __forceinline__ int row_bytes() const { return row_chunks * kRowChunkBytes; }

  // Stages `num_rows` adjacent rows (num_rows, k). All warps of the thread block call this; a
  // barrier of the thread block must follow.
  __device__ __forceinline__ void stage(const T* rows, int num_rows) const {
    constexpr int kBatch = 4;
    const int row_blocks = row_chunks / kLaneChunks, num_warps = blockDim.x / kWarpThreads;
    const int num_blocks = num_rows * row_blocks;
    for (int first = warp_index(); first < num_blocks; first += num_warps * kBatch) {
      uint4 values[kBatch][1];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int block = first + i * num_warps, row = block / row_blocks;
        const int chunk = (block - row * row_blocks) * kLaneChunks + lane_index() / 4;
        const int col = Chunks::column(chunk, 0);
        values[i][0] = uint4{};
        if (block < num_blocks && col < k) {
          values[i][0] =
              *reinterpret_cast<const uint4*>(rows + static_cast<int64_t>(row) * k + col);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int block = first + i * num_warps;
        if (block >= num_blocks) break;
        // Eight chunks of this row take the place of one chunk of eight rows.
        Chunks{.chunks = chunks}.store(values[i], 0, block);
      }
    }
  }

  // This lane's right operands of unit `unit` of row `row`, of its first chunk.
  __device__ __forceinline__ const uint8_t* operands(int row, int unit) const {
    return chunks + row * row_bytes() + unit * kUnitBytes + lane_index() % 4 * 16;
  }
};

}  // namespace kernelcat

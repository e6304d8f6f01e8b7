// A tile of float8 weights as the left operand of wgmma: widened from shared memory to registers.
#pragma once

#include <kernelcat/fp8.cuh>
#include <kernelcat/packed_tile.cuh>
#include <kernelcat/wgmma.cuh>
#include <kernelcat/widen.cuh>

namespace kernelcat {

// In 64 columns of weights a lane takes the 16 adjacent ones that begin at 16 * (lane % 4), four in
// each of four steps. So what wgmma takes for column 16 * s + c of the tile is column
// 16 * (c % 8 / 2) + 4 * s + c / 8 * 2 + c % 2 in memory. The right operand must have its columns
// in the same order. This returns the column in memory of position `position` of 64.
__host__ __device__ constexpr int float8_column(int position) {
  const int step = position / 16, c = position % 16;
  return 16 * (c % 8 / 2) + 4 * step + c / 8 * 2 + c % 2;
}

// Widens the left operands of the four steps of 64 columns, from column `col` on. `rows` is the
// warp's first row of 16: rows of 128 bytes in the 128-byte swizzle.
template <typename T>
__device__ __forceinline__ void decode_float8_tile(uint32_t (&operands)[kTileSteps][4],
                                                   const uint8_t* rows, int col) {
  const int row = lane_index() / 4;
  const uint8_t* place = rows + row * kRowBytes + ((col / 16 + lane_index() % 4 ^ row) << 4);
  uint4 words[2];  // of rows lane / 4 and lane / 4 + 8
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    words[i] = *reinterpret_cast<const uint4*>(place + i * 8 * kRowBytes);
  }
#pragma unroll
  for (int s = 0; s < kTileSteps; ++s) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4& four = words[i];
      const uint32_t word = s == 0 ? four.x : s == 1 ? four.y : s == 2 ? four.z : four.w;
      operands[s][i] = widen<T, 0x1404>(word);
      operands[s][i + 2] = widen<T, 0x3424>(word);
    }
  }
}

}  // namespace kernelcat

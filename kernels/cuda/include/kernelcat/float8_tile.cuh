// A tile of float8 weights as the left operand of wgmma: widened from shared memory to registers.
#pragma once

#include <kernelcat/fp8.cuh>
#include <kernelcat/packed_tile.cuh>
#include <kernelcat/wgmma.cuh>
#include <kernelcat/widen.cuh>

namespace kernelcat {

// In 64 columns of weights a lane takes the 16 adjacent ones that begin at 16 * (lane % 4), four in
// each of four steps. Of such four columns, wgmma takes 0 and 2 as one pair, 1 and 3 as the other.
// So what it takes for column 16 * s + c of the tile is column 16 * (c % 8 / 2) + 4 * s + c / 8 +
// 2 * (c % 2) in memory. The right operand must have its columns in the same order. This returns
// the column in memory of position `position` of 64.
__host__ __device__ constexpr int float8_column(int position) {
  const int step = position / 16, c = position % 16;
  return 16 * (c % 8 / 2) + 4 * step + c / 8 + c % 2 * 2;
}

// The bytes 0 and 2 of `word`, or with kOdd 1 and 3, as a pair of T: sign, exponent and mantissa at
// T's positions mean the e4m3 value times 2^-120 (bfloat16) or 2^-8 (float16).
template <typename T, bool kOdd>
__device__ __forceinline__ uint32_t float8_bits(uint32_t word) {
  constexpr int kShift = (kOdd ? 0 : 8) - (kIsBfloat16<T> ? 4 : 1);
  constexpr uint32_t kMagnitude = kIsBfloat16<T> ? 0x07f007f0 : 0x3f803f80;
  const uint32_t sign = kOdd ? word : word << 8;
  const uint32_t magnitude = kOdd ? word >> -kShift : word << (kOdd ? 0 : kShift);
  return (sign & 0x80008000) | (magnitude & kMagnitude);
}

// A lane's part of a tile of 16 rows of W by 64 columns.
template <typename T>
struct Float8Tile {
  uint4 words[2];  // of rows lane / 4 and lane / 4 + 8

  Float8Tile() = default;

  // The tile begins at column `col`. `rows` is its first row: rows of 128 bytes in the 128-byte
  // swizzle.
  __device__ __forceinline__ Float8Tile(const uint8_t* rows, int col) {
    const int row = lane_index() / 4;
    const uint8_t* place = rows + row * kRowBytes + ((col / 16 + lane_index() % 4 ^ row) << 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words[i] = *reinterpret_cast<const uint4*>(place + i * 8 * kRowBytes);
    }
  }

  // Widens the left operands of the tile's four steps, exactly (NaN becomes 480).
  __device__ __forceinline__ void decode_into(uint32_t (&operands)[kTileSteps][4]) const {
    constexpr uint32_t kPower = kIsBfloat16<T> ? 0x7b807b80 : 0x5c005c00;  // 2^120, 2^8
#pragma unroll
    for (int s = 0; s < kTileSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4& four = words[i];
        const uint32_t word = s == 0 ? four.x : s == 1 ? four.y : s == 2 ? four.z : four.w;
        operands[s][i] = multiply_pairs<T>(float8_bits<T, false>(word), kPower);
        operands[s][i + 2] = multiply_pairs<T>(float8_bits<T, true>(word), kPower);
      }
    }
  }
};

}  // namespace kernelcat

// A tile of float8 weights as the left operand of wgmma: widened from shared memory to registers.
#pragma once

#include <kernelcat/fp8.cuh>
#include <kernelcat/packed_tile.cuh>
#include <kernelcat/wgmma.cuh>
#include <kernelcat/widen.cuh>

namespace kernelcat {

// Widens the left operands of four steps, 16 columns each, from step `first_step` of the rows on.
// `rows` is the warp's first row of 16: rows of 128 bytes in the 128-byte swizzle. A step is one
// chunk of the swizzle, of which a lane takes two pairs of each of its two rows.
template <typename T>
__device__ __forceinline__ void decode_float8_tile(uint32_t (&operands)[kTileSteps][4],
                                                   const uint8_t* rows, int first_step) {
  const int row = lane_index() / 4;
  const uint8_t* pairs = rows + row * kRowBytes + lane_index() % 4 * 2;
#pragma unroll
  for (int s = 0; s < kTileSteps; ++s) {
    const uint8_t* chunk = pairs + ((first_step + s ^ row) << 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint16_t pair =
          *reinterpret_cast<const uint16_t*>(chunk + i % 2 * 8 * kRowBytes + i / 2 * 8);
      operands[s][i] = widen<T, 0x1404>(pair);
    }
  }
}

}  // namespace kernelcat

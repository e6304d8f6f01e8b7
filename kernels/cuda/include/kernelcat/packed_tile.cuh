// A tile of packed 4-bit weights as the left operand of wgmma: decoded from shared memory to
// registers.
#pragma once

#include <kernelcat/code_pairs.cuh>
#include <kernelcat/fp4_operand.cuh>
#include <kernelcat/wgmma_rs.cuh>

namespace kernelcat {

// A lane's part of a tile of 16 rows of W by 64 columns: codes, and the scales of its two rows.
// With kQuick, MXFP4 becomes bfloat16 by one product where no scale of the tile is 2 or more.
template <typename T, bool kNvfp4, bool kQuick = false>
struct PackedTile {
  using Scales = GroupScales<T, kNvfp4>;
  uint4 words;
  typename Scales::Raw raw;

  PackedTile() = default;

  // `codes` and `scales` are those of the whole tile.
  __device__ __forceinline__ PackedTile(const uint8_t* codes, const uint8_t* scales)
      : words(reinterpret_cast<const uint4*>(codes)[lane_index()]),
        raw(reinterpret_cast<const typename Scales::Raw*>(scales)[lane_index() / 4]) {}

  // Decodes the left operands of the tile's four steps.
  __device__ __forceinline__ void decode_into(uint32_t (&operands)[kTileSteps][4]) const {
    if constexpr (kQuick && !kNvfp4 && kIsBfloat16<T>) {
      if (!__any_sync(0xffffffff, raw & 0x80808080)) {  // no code of a scale is 128 or more
        decode_small_scales(operands);
        return;
      }
    }
    const Scales decoded(raw);
    TileScales<kNvfp4> scales;
#pragma unroll
    for (int i = 0; i < TileScales<kNvfp4>::kWords; ++i) scales.pairs[i] = decoded.pairs[i];
    decode<T, kNvfp4, 0>(operands[0], words.x, scales);
    decode<T, kNvfp4, 1>(operands[1], words.y, scales);
    decode<T, kNvfp4, 2>(operands[2], words.z, scales);
    decode<T, kNvfp4, 3>(operands[3], words.w, scales);
  }

  // The bits of a code mean its value times 2^-126. So a weight is code * (2^126 * scale), and that
  // factor is finite in bfloat16 for scales below 2: its exponent field is the scale's code + 126.
  __device__ __forceinline__ void decode_small_scales(uint32_t (&operands)[kTileSteps][4]) const {
    uint32_t factors[2][2];  // [lower row][block of 32 columns], in both halves
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      factors[i / 2][i % 2] = ((raw >> 8 * i & 0xff) + 126) * 0x00800080;
    }
    const uint32_t codes[kTileSteps] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int s = 0; s < kTileSteps; ++s) {
      uint32_t pairs[4];
      code_pairs<T>(pairs, codes[s]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        operands[s][i] = multiply_pairs<T>(pairs[i], factors[i % 2][s / 2]);
      }
    }
  }
};

// Starts the wgmmas of the tiles of a warpgroup, one for each warp, and commits them; `a` is the
// matrix descriptor of 64 columns of kCols rows of A.
template <typename T, int kCols>
__device__ __forceinline__ void multiply_packed_tile(float (&sums)[kCols / 2],
                                                     uint32_t (&operands)[kTileSteps][4],
                                                     uint64_t a, bool accumulate) {
  pin(sums);
  pin(operands);
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kTileSteps; ++s) {
    WgmmaRs<T, kCols, OperandB::kRowsOfN>::multiply(sums, operands[s], advanced(a, s * kWgmmaK * 2),
                                                    accumulate || s > 0);
  }
  wgmma_commit();
  pin(sums);
}

}  // namespace kernelcat

// A tile of packed 4-bit weights as the left operand of wgmma: decoded from shared memory to
// registers.
#pragma once

#include <kernelcat/fp4_operand.cuh>
#include <kernelcat/wgmma_rs.cuh>

namespace kernelcat {

// A lane's part of a tile of 16 rows of W by 64 columns: codes, and the scales of its two rows.
template <typename T, bool kNvfp4>
struct PackedTile {
  using Scales = GroupScales<T, kNvfp4>;
  uint4 words;
  typename Scales::Raw raw;

  // `codes` and `scales` are those of the whole tile.
  __device__ __forceinline__ PackedTile(const uint8_t* codes, const uint8_t* scales)
      : words(reinterpret_cast<const uint4*>(codes)[lane_index()]),
        raw(reinterpret_cast<const typename Scales::Raw*>(scales)[lane_index() / 4]) {}

  // Decodes the left operands of the tile's four steps.
  __device__ __forceinline__ void decode_into(uint32_t (&operands)[kTileSteps][4]) const {
    const Scales decoded(raw);
    TileScales<kNvfp4> scales;
#pragma unroll
    for (int i = 0; i < TileScales<kNvfp4>::kWords; ++i) scales.pairs[i] = decoded.pairs[i];
    decode<T, kNvfp4, 0>(operands[0], words.x, scales);
    decode<T, kNvfp4, 1>(operands[1], words.y, scales);
    decode<T, kNvfp4, 2>(operands[2], words.z, scales);
    decode<T, kNvfp4, 3>(operands[3], words.w, scales);
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

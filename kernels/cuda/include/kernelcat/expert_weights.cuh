// Weights of experts, one element at a time; reference/_experts.py defines formats and packings.
#pragma once

#include <kernelcat/fp4.cuh>
#include <kernelcat/fp8.cuh>

namespace kernelcat {

enum class WeightFormat { kSixteenBits, kFp8, kMxfp4, kNvfp4 };

// The weights of one expert, a matrix (n, k). T is the type of 16-bit weights; the operand that
// multiplies 4-bit weights has the type A, to which they are rounded if the type has 16 bits.
template <WeightFormat kFormat, bool kTiles, typename T, typename A>
struct ExpertWeights {
  static constexpr bool kIsFp4 = kFormat == WeightFormat::kMxfp4 || kFormat == WeightFormat::kNvfp4;
  static constexpr bool kNvfp4 = kFormat == WeightFormat::kNvfp4;
  static constexpr int kBlock = kFp4Block<kNvfp4>;        // codes that share a scale
  static constexpr int kTileRows = 16, kTileCols = 64;    // reference/_fp4_tiles.py
  static constexpr int kTileScales = kTileCols / kBlock;  // of a row of a tile
  static constexpr int kTileBytes = kTileRows * kTileCols / 2;

  const void* w;      // (n, k) as stored: codes in rows, or tiles
  const void* scale;  // see scale_at()
  float factor;       // NVFP4's global scale, else 1
  int64_t k;

  // Expert `expert` of all experts' weights, scales and global scales. The latter two are null
  // where the format has none.
  static __device__ __forceinline__ ExpertWeights of(const void* w, const void* scale,
                                                     const float* global_scale, int64_t expert,
                                                     int64_t n, int64_t k) {
    const auto* bytes = static_cast<const uint8_t*>(w);
    const auto* scale_bytes = static_cast<const uint8_t*>(scale);
    if constexpr (kFormat == WeightFormat::kSixteenBits) {
      return {bytes + expert * n * k * 2, nullptr, 1.0f, k};
    } else if constexpr (kFormat == WeightFormat::kFp8) {
      const int64_t blocks = ceil_div<int64_t>(n, kScaleBlock) * ceil_div<int64_t>(k, kScaleBlock);
      return {bytes + expert * n * k, scale_bytes + expert * blocks * 4, 1.0f, k};
    } else {
      const int64_t rows = kTiles ? ceil_div<int64_t>(n, kTileRows) * kTileRows : n;
      const int64_t cols = kTiles ? ceil_div<int64_t>(k, kTileCols) * kTileCols : k;
      return {bytes + expert * rows * cols / 2, scale_bytes + expert * rows * cols / kBlock,
              kNvfp4 ? global_scale[expert] : 1.0f, k};
    }
  }

  __device__ __forceinline__ float fp4_at(int64_t row, int64_t col) const {
    const auto* codes = static_cast<const uint8_t*>(w);
    const auto* scales = static_cast<const uint8_t*>(scale);
    float value;
    if constexpr (kTiles) {
      const int64_t tile = row / kTileRows * ceil_div<int64_t>(k, kTileCols) + col / kTileCols;
      const int lane = row % 8 * 4 + col % 8 / 2;
      const int nibble = row % kTileRows / 8 + col % 16 / 8 * 2 + col % 2 * 4;
      const int byte = lane * 16 + col % kTileCols / 16 * 4 + nibble / 2;
      const int s = (row % 8 * 2 + row % kTileRows / 8) * kTileScales + col % kTileCols / kBlock;
      value = code_value(codes[tile * kTileBytes + byte], nibble % 2) *
              scale_value<kNvfp4>(scales[tile * kTileRows * kTileScales + s]);
    } else {
      value = code_value(codes[(row * k + col) / 2], col % 2) *
              scale_value<kNvfp4>(scales[(row * k + col) / kBlock]);
    }
    return sizeof(A) == 2 ? to_float(from_float<T>(value)) : value;
  }

  // Element (row, col), without `factor`.
  __device__ __forceinline__ float at(int64_t row, int64_t col) const {
    if constexpr (kFormat == WeightFormat::kSixteenBits) {
      return to_float(static_cast<const T*>(w)[row * k + col]);
    } else if constexpr (kFormat == WeightFormat::kFp8) {
      const int64_t block =
          row / kScaleBlock * ceil_div<int64_t>(k, kScaleBlock) + col / kScaleBlock;
      return to_float(static_cast<const float8_e4m3fn*>(w)[row * k + col]) *
             static_cast<const float*>(scale)[block];
    } else {
      return fp4_at(row, col);
    }
  }
};

}  // namespace kernelcat

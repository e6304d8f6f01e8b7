// Decodes packed weights and their scales to operands of tensor cores, in registers.
//
// The scales of four tiles of 16 x 64 are read together: lane l reads and decodes the scales of
// rows l % 8 and l % 8 + 8 of tile l / 8. Then every lane fetches the eight (NVFP4) or four (MXFP4)
// scales that it needs of a tile by shuffles. To shift codes into a float's fields, and to multiply
// the float by a power of two, is Marlin's way (Frantar et al. 2024) and that of vLLM's FP4
// kernels.
#pragma once

#include <kernelcat/fp4.cuh>
#include <kernelcat/sync.cuh>
#include <kernelcat/widen.cuh>

namespace kernelcat {

constexpr int kTileRows = 16, kTileCols = 64;
constexpr int kTileCodes = kTileRows * kTileCols / 2;  // bytes
constexpr int kTileSteps = kTileCols / 16;             // of 16 columns, what one mma has
constexpr int kGroup = 4;                              // tiles whose scales are read together

template <bool kNvfp4>
constexpr int kTileScales = kTileRows * kTileCols / kFp4Block<kNvfp4>;  // bytes

// Decoded weights are the real weights / kGrowth, so that scales fit into T: see widen.cuh. Sums
// are multiplied by kGrowth.
template <bool kNvfp4>
constexpr float kGrowth = kNvfp4 ? 0x1p7f : 1.0f;

// A register with half kHalf of `pair` in both halves.
template <int kHalf>
__device__ __forceinline__ uint32_t twice(uint32_t pair) {
  uint32_t result;
  if constexpr (kHalf == 0) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}"
        : "=r"(result)
        : "r"(pair));
  } else {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}"
        : "=r"(result)
        : "r"(pair));
  }
  return result;
}

// The scales of a tile that a lane needs, in pairs: for row r = lane / 4 those of blocks 0 and 1
// (and with NVFP4 of blocks 2 and 3), then the same for row r + 8.
template <bool kNvfp4>
struct TileScales {
  static constexpr int kWords = kNvfp4 ? 4 : 2;
  uint32_t pairs[kWords];

  // The scale of step kStep in both halves of a register, for row r, or with kLower for row r + 8.
  template <int kStep, bool kLower>
  __device__ __forceinline__ uint32_t of() const {
    constexpr int kBlock = kNvfp4 ? kStep : kStep / 2;
    return twice<kBlock % 2>(pairs[(kLower ? kWords / 2 : 0) + kBlock / 2]);
  }
};

// The scales of kGroup tiles that one lane reads and decodes: `Raw` is what it reads.
template <typename T, bool kNvfp4>
struct GroupScales;

template <typename T>
struct GroupScales<T, true> {
  using Raw = uint2;
  uint32_t pairs[4];

  GroupScales() = default;
  __device__ __forceinline__ explicit GroupScales(const Raw& raw) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = i < 2 ? raw.x : raw.y;
      pairs[i] = widen_scales<T>(__byte_perm(word, 0, i % 2 == 0 ? 0x1404 : 0x3424));
    }
  }
};

template <typename T>
struct GroupScales<T, false> {
  using Raw = uint32_t;
  uint32_t pairs[2];

  GroupScales() = default;

  // The scale of a code, in 16 bits. bfloat16 has as many exponent bits as e8m0; there 2^-127 (code
  // 0) is a subnormal number. float16 has fewer, so a scale is two factors there: see factors().
  static __device__ __forceinline__ uint32_t power(uint32_t code) {
    if constexpr (!kIsBfloat16<T>) return factors(code);
    return code == 0 ? 0x40 : code << 7;
  }

  // The high bytes of two float16 numbers, whose low bytes are zero and whose product is the scale
  // times 2^14: the bits of a weight's code mean its value times 2^-14. The product with the first
  // factor is exact, so the second product is rounded as the weight is: to zero where the scale is
  // less than 2^-28, to infinity where it is more than 2^16.
  static __device__ __forceinline__ uint32_t factors(uint32_t code) {
    if (code > 127 + 16) return 0x7b7b;                       // 57344 and 57344
    if (code == 127 + 16) return 0x7878;                      // 2^15 and 2^15
    if (code >= 127 - 14) return 0x7400 | (code - 112) << 2;  // 2^14 and the scale
    return 0x3c00 | (code > 98 ? code - 98 : 0) << 2;         // 1 and the scale times 2^14
  }

  __device__ __forceinline__ explicit GroupScales(Raw raw) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = raw >> 16 * i & 0xff, high = raw >> (16 * i + 8) & 0xff;
      pairs[i] = power(low) | power(high) << 16;
    }
  }
};

// The scales of tile `tile` of the group, for each lane of the warp.
template <bool kNvfp4, typename T>
__device__ __forceinline__ TileScales<kNvfp4> tile_scales(const GroupScales<T, kNvfp4>& scales,
                                                          int tile) {
  TileScales<kNvfp4> result;
#pragma unroll
  for (int i = 0; i < TileScales<kNvfp4>::kWords; ++i) {
    result.pairs[i] = __shfl_sync(0xffffffff, scales.pairs[i], tile * 8 + lane_index() / 4);
  }
  return result;
}

// Pair kPair of a word's codes (nibbles kPair and kPair + 4), shifted into the fields of a pair of
// T: their values times 2^-126 (bfloat16) or 2^-14 (float16).
template <typename T, int kPair>
__device__ __forceinline__ uint32_t shift_into_fields(uint32_t word) {
  constexpr int kShift = 12 - 4 * kPair - (kIsBfloat16<T> ? 6 : 3);
  constexpr uint32_t kMagnitude = kIsBfloat16<T> ? 0x01c001c0 : 0x0e000e00;
  const uint32_t sign = word << (12 - 4 * kPair);
  const uint32_t magnitude = kShift < 0 ? word >> -kShift : word << (kShift < 0 ? 0 : kShift);
  return (sign & 0x80008000) | (magnitude & kMagnitude);
}

// The 16 x 16 left operand of step kStep: codes times scales, divided by kGrowth. The scales of
// MXFP4 span the whole range of bfloat16, so codes are first multiplied by 2^126 to their real
// values; in float16 by the first of the scale's two factors.
template <typename T, bool kNvfp4, int kStep>
__device__ __forceinline__ void decode(uint32_t (&operand)[4], uint32_t word,
                                       const TileScales<kNvfp4>& scales) {
  const uint32_t upper = scales.template of<kStep, false>();
  const uint32_t lower = scales.template of<kStep, true>();
  uint32_t pairs[4] = {shift_into_fields<T, 0>(word), shift_into_fields<T, 1>(word),
                       shift_into_fields<T, 2>(word), shift_into_fields<T, 3>(word)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t scale = i % 2 == 0 ? upper : lower;
    if constexpr (!kNvfp4 && kIsBfloat16<T>) {
      pairs[i] = multiply_pairs<T>(pairs[i], 0x7e807e80);  // 2^126
    } else if constexpr (!kNvfp4) {
      pairs[i] = multiply_pairs<T>(pairs[i], scale & 0xff00ff00);
      scale = scale << 8 & 0xff00ff00;
    }
    operand[i] = multiply_pairs<T>(pairs[i], scale);
  }
}

}  // namespace kernelcat

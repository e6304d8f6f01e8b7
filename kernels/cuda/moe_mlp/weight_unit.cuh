// Weights as a warp multiplies them: units of 16 rows, one 16-byte load of a lane at a time.
//
// Rows of 8 or 16 bits stay in their order in memory, and a lane takes 16 adjacent bytes of rows
// lane / 4 and lane / 4 + 8. What mma.sync takes for neighbouring columns are then columns far
// apart, which changes no sum as long as activations are in the same order: see staged_rows.cuh.
//
// Bits of 4-bit and 8-bit weights are moved to the places of a 16-bit type's sign, exponent and
// mantissa. That divides them by a power of two, for which sums are multiplied by kGrowth. bfloat16
// activations are multiplied by 2^60 before, so that products are far from float32's smallest.
#pragma once

#include <kernelcat/code_pairs.cuh>
#include <kernelcat/expert_weights.cuh>
#include <kernelcat/fp8_to_fp16.cuh>
#include <kernelcat/mma.cuh>
#include <kernelcat/mma_fp8.cuh>
#include <kernelcat/widen.cuh>

namespace kernelcat {

// Two e4m3 values in the low or high bytes of a word as a pair of T: times 2^-120 for bfloat16,
// exact for float16.
template <typename T, bool kHigh>
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t word) {
  if constexpr (kIsBfloat16<T>) {
    const uint32_t high = __byte_perm(word, 0, kHigh ? 0x3424 : 0x1404);
    return (high & 0x80008000) | (high >> 4 & 0x07f007f0);
  } else {
    return e4m3_to_float16(kHigh ? word >> 16 : word);
  }
}

// The factors of a lane's sums: of row lane / 4, and of the row 8 below.
struct RowScales {
  float upper, lower;
};

template <typename T_, typename A, WeightFormat kFormat>
struct WeightUnit {
  using T = T_;
  static constexpr bool kIsFp8 = kFormat == WeightFormat::kFp8;
  static constexpr bool kNvfp4 = kFormat == WeightFormat::kNvfp4;
  static constexpr bool kIsFp4 = kNvfp4 || kFormat == WeightFormat::kMxfp4;
  static constexpr bool kIsSixteenBits = kFormat == WeightFormat::kSixteenBits;
  static constexpr bool kFp8Products = sizeof(A) == 1;
  static_assert(!kFp8Products || kIsFp8);

  static constexpr int kRows = 16, kCols = kIsFp8 ? 128 : 64;
  static constexpr int kLoads = kIsFp4 ? 1 : 4;                            // of 16 bytes, of a lane
  static constexpr int kScaleBytes = kIsSixteenBits ? 0 : kNvfp4 ? 8 : 4;  // of a lane
  // Columns of activations of which a lane has 16 bytes: two steps, i.e. columns of one mma.
  static constexpr int kChunkCols = kFp8Products ? 64 : 32;
  static constexpr int kSteps = kCols / kChunkCols * 2;
  // Steps whose products share a scale; 0 without scales.
  static constexpr int kScaledSteps = kIsSixteenBits ? 0 : kIsFp8 ? kSteps : kNvfp4 ? 1 : 2;

  static constexpr bool kHasPrescale = kIsBfloat16<T> && !kIsSixteenBits && !kFp8Products;
  static constexpr float kGrowth = kHasPrescale ? (kIsFp4 ? 0x1p66f : 0x1p60f)
                                   : kIsFp4     ? 0x1p14f
                                                : 1.0f;

  static __device__ constexpr bool is_last_of_scale(int step) {
    return kScaledSteps > 0 && (step + 1) % (kScaledSteps > 0 ? kScaledSteps : 1) == 0;
  }

  uint4 codes[kLoads];
  uint32_t scales[2];

  // Word `i` of what the lane has loaded: four of each load.
  __device__ __forceinline__ uint32_t word(int i) const {
    const uint4& four = codes[i / 4];
    return i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
  }

  // The left operand of a step. Loads of 8-bit and 16-bit weights alternate between the upper and
  // the lower row.
  template <int kStep>
  __device__ __forceinline__ void operand(uint32_t (&a)[4]) const {
    if constexpr (kIsFp4) {
      code_pairs<T>(a, word(kStep));
    } else if constexpr (kIsFp8 && !kFp8Products) {
      const uint32_t upper = word(kStep / 4 * 8 + kStep % 4);
      const uint32_t lower = word(kStep / 4 * 8 + kStep % 4 + 4);
      a[0] = e4m3_pair<T, false>(upper);
      a[1] = e4m3_pair<T, false>(lower);
      a[2] = e4m3_pair<T, true>(upper);
      a[3] = e4m3_pair<T, true>(lower);
    } else {
      constexpr int kUpper = kStep / 2 * 8 + kStep % 2 * 2;
      a[0] = word(kUpper);
      a[1] = word(kUpper + 4);
      a[2] = word(kUpper + 1);
      a[3] = word(kUpper + 5);
    }
  }

  // The scales of the steps up to kStep that share one.
  template <int kStep>
  __device__ __forceinline__ RowScales row_scales() const {
    constexpr int kBlock = kStep / kScaledSteps;
    if constexpr (kNvfp4) {
      const auto at = [](uint32_t word) { return scale_value<true>(word >> 8 * kBlock & 0xff); };
      return {at(scales[0]), at(scales[1])};
    } else if constexpr (kIsFp4) {  // 2^-127 and NaN become 0 and infinity
      const auto at = [&](int i) { return __uint_as_float((scales[0] >> 8 * i & 0xff) << 23); };
      return {at(kBlock), at(2 + kBlock)};
    } else {
      return {__uint_as_float(scales[0]), __uint_as_float(scales[0])};
    }
  }

  // The product of a step; `b` are a lane's right operands of the step.
  __device__ static __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4],
                                                  const uint2& b) {
    if constexpr (kFp8Products) {
      mma_16x8x32_e4m3(sums, a, b.x, b.y);
    } else {
      mma_16x8x16<T>(sums, a, b.x, b.y);
    }
  }
};

}  // namespace kernelcat

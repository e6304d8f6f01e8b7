// Scales of blocks, and what their elements are multiplied by, in as few instructions as there are.
#pragma once

#include <kernelcat/fp4.cuh>

namespace kernelcat {

// 1 / x to nearest, of what is not near the ends of float's range.
__device__ __forceinline__ float quick_reciprocal(float x) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(x));
  return fmaf(guess, fmaf(-x, guess, 1.0f), guess);
}

// `Scaling` in fewer instructions. A NaN has the scale NaN and an inverse that means nothing.
// Values that were rotated are four times too large, and so is their `amax`; the inverse is what
// they are multiplied by, for random codes 2^-14 of it.
template <bool kNvfp4, bool kRotated, bool kStochastic>
struct QuickScaling;

template <bool kRotated, bool kStochastic>
constexpr float kInverseShare = (kRotated ? 0x1p-2f : 1.0f) * (kStochastic ? 0x1p-14f : 1.0f);

template <bool kRotated, bool kStochastic>
struct QuickScaling<true, kRotated, kStochastic> {
  float per_six, divisor;  // of amax, and of a scale

  __device__ __forceinline__ explicit QuickScaling(const float* global)
      : per_six(quick_reciprocal(__fmul_rn(kE2m1Max, *global)) * (kRotated ? 0.25f : 1.0f)),
        divisor(*global / kInverseShare<kRotated, kStochastic>) {}

  __device__ __forceinline__ BlockScale of(float amax) const {
    const uint32_t code = e4m3(__fmul_rn(amax, per_six));
    const float scale = __uint_as_float((code << 20) + kE4m3Bias);
    return {code, quick_reciprocal(__fmul_rn(scale, divisor))};
  }

  // Whether values of a block may be 7 or more.
  static __device__ __forceinline__ bool saturates(uint32_t code) { return code >= 0x7e; }

 private:
  // Never subnormal, saturating.
  static __device__ __forceinline__ uint32_t e4m3(float value) {
    constexpr float kLeast = 0x1p-6f;
#if __CUDA_ARCH__ >= 890
    uint32_t code;
    asm("{\n"
        ".reg .b16 code, zero;\n"
        ".reg .f32 value;\n"
        "mov.b16 zero, 0;\n"
        "max.NaN.f32 value, %1, %2;\n"
        "cvt.rn.satfinite.e4m3x2.f32 code, 0f00000000, value;\n"
        "mov.b32 %0, {code, zero};\n"
        "}\n"
        : "=r"(code)
        : "f"(value), "f"(kLeast));
    return code;
#else
    const uint32_t bits = __float_as_uint(fminf(fmaxf(value, kLeast), 448.0f));
    const uint32_t code = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (kE4m3Bias >> 20);
    return value == value ? code : Scaling<true>::kNan;
#endif
  }
};

template <bool kRotated, bool kStochastic>
struct QuickScaling<false, kRotated, kStochastic> : Scaling<false> {
  __device__ __forceinline__ explicit QuickScaling(const float* global) : Scaling(global) {}

  __device__ __forceinline__ BlockScale of(float amax) const {
    const BlockScale found = Scaling::of(amax * (kRotated ? 0.25f : 1.0f));
    return {amax == amax ? found.code : kNan, found.inverse * kInverseShare<kRotated, kStochastic>};
  }

  static __device__ __forceinline__ bool saturates(uint32_t) { return true; }
};

}  // namespace kernelcat

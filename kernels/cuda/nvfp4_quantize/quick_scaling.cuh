// Fast twin of Scaling of reference_codes.cuh: the scale of a block, and the factor that its
// elements are multiplied by, in the fewest instructions.
#pragma once

#include "reference_codes.cuh"

namespace kernelcat {

// 1 / x rounded to nearest, for an x that is not near the ends of the range of float.
__device__ __forceinline__ float quick_reciprocal(float x) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(x));
  return fmaf(guess, fmaf(-x, guess, 1.0f), guess);
}

// Scaling in fewer instructions. `amax` may be NaN: the scale is then NaN, and `inverse` undefined.
// With kRotated the values and their `amax` are four times as large as after the transform, which
// `inverse` makes up for. With kStochastic `inverse` is 2^-14 of the factor, as
// random_codes_by_halves() needs it.
template <bool kNvfp4, bool kRotated, bool kStochastic>
struct QuickScaling;

template <bool kRotated, bool kStochastic>
constexpr float kInverseFactor = (kRotated ? 0x1p-2f : 1.0f) * (kStochastic ? 0x1p-14f : 1.0f);

template <bool kRotated, bool kStochastic>
struct QuickScaling<true, kRotated, kStochastic> {
  float per_six;  // times amax: the scale
  float divisor;  // 1 / (scale * divisor) is `inverse`

  __device__ __forceinline__ explicit QuickScaling(const float* global)
      : per_six(quick_reciprocal(__fmul_rn(kE2m1Max, *global)) * (kRotated ? 0.25f : 1.0f)),
        divisor(*global / kInverseFactor<kRotated, kStochastic>) {}

  __device__ __forceinline__ BlockScale of(float amax) const {
    const uint32_t code = e4m3(__fmul_rn(amax, per_six));
    const float scale = __uint_as_float((code << 20) + kE4m3Bias);
    return {code, quick_reciprocal(__fmul_rn(scale, divisor))};
  }

  // Whether a block's values times `inverse` can reach 7.
  static __device__ __forceinline__ bool saturates(uint32_t code) { return code >= 0x7e; }

 private:
  // The code of `value` in E4M3, never that of a subnormal; saturates.
  static __device__ __forceinline__ uint32_t e4m3(float value) {
    constexpr float kMinScale = 0x1p-6f;
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
        : "f"(value), "f"(kMinScale));
    return code;
#else
    const uint32_t bits = __float_as_uint(fminf(fmaxf(value, kMinScale), 448.0f));
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
    return {amax == amax ? found.code : kNan,
            found.inverse * kInverseFactor<kRotated, kStochastic>};
  }

  static __device__ __forceinline__ bool saturates(uint32_t) { return true; }
};

}  // namespace kernelcat

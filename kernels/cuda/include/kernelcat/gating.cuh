// The activations of mixture-of-experts layers, in float32; reference/_experts.py defines them.
#pragma once

#include <kernelcat/epilogue.cuh>
#include <kernelcat/quick_math.cuh>
#include <kernelcat/softmax.cuh>

namespace kernelcat {

// kSwiglu and kSwigluOai make one column of each pair of columns, gate and up.
enum class Gating { kNone, kSwiglu, kSwigluOai };

template <Gating kGating>
constexpr bool kIsGated = kGating != Gating::kNone;

// What becomes of a gate and the value `up` beside the gate. A NaN passes the clamps.
template <Gating kGating>
__device__ __forceinline__ float gated(float gate, float up) {
  static_assert(kIsGated<kGating>);
  if constexpr (kGating == Gating::kSwiglu) return silu(gate) * up;
  constexpr float kLimit = 7.0f, kAlpha = 1.702f;
  gate = gate > kLimit ? kLimit : gate;
  up = up > kLimit ? kLimit : up < -kLimit ? -kLimit : up;
  return __fdividef(gate, 1.0f + __expf(-kAlpha * gate)) * (up + 1.0f);
}

// The same without range checks: 9 instructions instead of 17 (kSwigluOai).
template <Gating kGating>
__device__ __forceinline__ float quick_gated(float gate, float up) {
  static_assert(kIsGated<kGating>);
  constexpr float kLimit = 7.0f, kAlpha = 1.702f;
  constexpr bool kClamps = kGating == Gating::kSwigluOai;
  if (kClamps) {
    gate = min_or_nan(gate, kLimit);
    up = max_or_nan(min_or_nan(up, kLimit), -kLimit);
  }
  const float exp = fast_exp2(gate * (kClamps ? -kAlpha * kLog2E : -kLog2E));
  const float activated = gate * quick_reciprocal(1.0f + exp);
  return kClamps ? fmaf(activated, up, activated) : activated * up;
}

}  // namespace kernelcat

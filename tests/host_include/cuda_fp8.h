// float8_e4m3fn on the host: what kernelcat/fp8.cuh and kernelcat/quantize.cuh use.
#pragma once

#include "cuda_host.h"

enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3 };

namespace host {

// The nearest of the 127 magnitudes of E4M3, the even code of two that are equally near; saturates.
inline uint8_t e4m3(float value) {
  const auto decode = [](int code) {
    const float fraction = code % 8 / 8.0f;
    return code < 8 ? std::ldexp(fraction, -6) : std::ldexp(1 + fraction, code / 8 - 7);
  };
  const float size = std::min(std::fabs(value), 448.0f);
  int best = 0;
  for (int code = 1; code < 127; ++code) {
    const float distance = std::fabs(decode(code) - size), least = std::fabs(decode(best) - size);
    if (distance < least || (distance == least && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

}  // namespace host

struct __nv_fp8_e4m3 {
  uint8_t bits;
  __nv_fp8_e4m3() = default;
  explicit __nv_fp8_e4m3(float value) : bits(host::e4m3(value)) {}
  explicit operator float() const {
    const float size = bits % 128 < 8 ? std::ldexp(bits % 8 / 8.0f, -6)
                                      : std::ldexp(1 + bits % 8 / 8.0f, bits % 128 / 8 - 7);
    return bits & 0x80 ? -size : size;
  }
};

inline uint16_t __nv_cvt_float2_to_fp8x2(float2 pair, __nv_saturation_t,
                                         __nv_fp8_interpretation_t) {
  return static_cast<uint16_t>(host::e4m3(pair.x) | host::e4m3(pair.y) << 8);
}
inline float2 make_float2(float x, float y) {
  return {x, y};
}

// Stand-in of quick_math.cuh on the host: the same values, rounded exactly.
#pragma once

namespace kernelcat {

inline float quick_reciprocal(float x) {
  return 1.0f / x;
}
inline float min_or_nan(float a, float b) {
  return a != a || a < b ? a : b;
}
inline float max_or_nan(float a, float b) {
  return a != a || a > b ? a : b;
}

}  // namespace kernelcat

// Copy kernels, some of which fail on purpose: wrong results, writes outside of the output, endless
// loops, code that does not compile. The tuner must record each failure and go on.

namespace planted {

using uint16_t = unsigned short;
using int64_t = long long;

enum Kind { kGood, kSlow, kHangs, kOverruns, kIllegal, kLies };

template <Kind kKind>
__global__ void copy(const uint16_t* src, uint16_t* dst, int64_t n) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if constexpr (kKind == kHangs) {
    for (;;) __nanosleep(1000);
  }
  if constexpr (kKind == kIllegal) dst = reinterpret_cast<uint16_t*>(16ull);
  if constexpr (kKind == kSlow) __nanosleep(200000);
  for (int64_t i = first; i < n; i += step) dst[i] = src[i];
  if constexpr (kKind == kOverruns) {
    if (first == 0) dst[n] = 1;
  }
  if constexpr (kKind == kLies) {
    if (first == 0) dst[n / 2] = src[n / 2] + 1;
  }
}

}  // namespace planted

#ifdef REFUSED
#error "planted: this does not compile"
#endif

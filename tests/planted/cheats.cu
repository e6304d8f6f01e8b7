// Copies that cheat: each is right in its first runs, and skips work where nobody looks.
// The grid has kBlocks thread blocks of any size; each thread block cheats for itself.

namespace planted {

using uint16_t = unsigned short;
using int64_t = long long;

constexpr int kBlocks = 264;
constexpr int kSlots = 1024;

__device__ const void* remembered[kBlocks][kSlots];
__device__ unsigned calls[kBlocks];
__device__ unsigned long long end_ns[kBlocks];

enum Kind { kHonest, kAddress, kPoison, kBurst, kTires, kWritesFF, kRestores };

__device__ inline unsigned long long now_ns() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

// Whether this thread block skips this run; decided by one thread for all.
template <Kind kKind>
__device__ bool skips(const uint16_t* src) {
  __shared__ bool is_skipped;
  if (threadIdx.x == 0) {
    is_skipped = false;
    const unsigned number = ++calls[blockIdx.x];
    if constexpr (kKind == kAddress) {
      const auto slot = (reinterpret_cast<unsigned long long>(src) >> 9) % kSlots;
      is_skipped = remembered[blockIdx.x][slot] == src;
      remembered[blockIdx.x][slot] = src;
    }
    if constexpr (kKind == kBurst) {
      is_skipped = now_ns() - end_ns[blockIdx.x] < 50000;
    }
    if constexpr (kKind == kTires) is_skipped = number > 500;
    if constexpr (kKind == kRestores) is_skipped = number > 500 && number % 2 == 0;
  }
  __syncthreads();
  return is_skipped;
}

template <Kind kKind>
__global__ void cheat(const uint16_t* src, uint16_t* dst, int64_t n) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool skip = skips<kKind>(src);
  if constexpr (kKind == kPoison) {
    for (int64_t i = first; i < n; i += step) {
      if (dst[i] == 0xFFFF) dst[i] = src[i];
    }
    return;
  }
  if (!skip) {
    for (int64_t i = first; i < n; i += step) dst[i] = src[i];
  }
  if constexpr (kKind == kBurst) {
    __syncthreads();
    if (threadIdx.x == 0) end_ns[blockIdx.x] = now_ns();
  }
  if constexpr (kKind == kWritesFF) {
    if (first == 0) dst[n] = 0xFFFF;
  }
  if constexpr (kKind == kRestores) {
    // The first element belongs to this thread alone. The input changes in one run, and the next
    // run changes the input back.
    if (first == 0 && calls[0] > 500) const_cast<uint16_t*>(src)[0] ^= 1;
    if (first == 0 && !skip) dst[0] = src[0] ^ (calls[0] > 500);
  }
}

}  // namespace planted

// The headers of kernels/cuda/include/kernelcat that consist of inline PTX, on a CPU. A cluster has
// one thread block, and mma follows PTX's table of fragments.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

inline int lane_index() {
  return threadIdx.x % kWarpThreads;
}
inline void grid_dependency_wait() {}
inline void launch_dependents() {}
inline void prefetch_l2(const void*) {}
inline void cluster_arrive_relaxed() {}
inline void cluster_wait() {}
inline void cluster_sync() {}
inline uint32_t cluster_rank() {
  return 0;
}

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
inline float fast_exp2(float x) {
  return std::exp2(x);
}

struct Fragments {
  uint32_t a[4], b[2];
};

template <typename T>
void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b_low, uint32_t b_high) {
  const auto element = [](uint32_t word, int k) {
    return to_float(__builtin_bit_cast(T, static_cast<uint16_t>(word >> k % 2 * 16)));
  };
  const Fragments fragments{{a[0], a[1], a[2], a[3]}, {b_low, b_high}};
  exchange(fragments, [&](auto slot) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane_index() / 4 + i / 2 * 8, col = lane_index() % 4 * 2 + i % 2;
      for (int k = 0; k < 16; ++k) {
        const uint32_t a_word = slot(row % 8 * 4 + k % 8 / 2)->a[row / 8 + k / 8 * 2];
        const uint32_t b_word = slot(col * 4 + k % 8 / 2)->b[k / 8];
        d[i] += element(a_word, k) * element(b_word, k);
      }
    }
  });
}

}  // namespace kernelcat

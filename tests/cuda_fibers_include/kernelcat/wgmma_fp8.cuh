// kernels/cuda/include/kernelcat/wgmma_fp8.cuh on the host.
#pragma once

#include <kernelcat/fp8.cuh>
#include <kernelcat/wgmma.cuh>

namespace kernelcat {

constexpr int kWgmmaFp8K = 32;

template <int N>
struct WgmmaE4m3 {
  template <bool kAccumulate>
  static void multiply(float (&d)[N / 2], uint64_t a, uint64_t b) {
    const int thread = host::current->thread;
    host::current->products.back().push_back(
        [=, &d] { compute_products<float8_e4m3fn, N, kWgmmaFp8K>(d, a, b, kAccumulate, thread); });
  }
};

}  // namespace kernelcat

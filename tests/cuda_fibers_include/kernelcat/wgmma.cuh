// kernels/cuda/include/kernelcat/wgmma.cuh on the host: a thread computes its own accumulators,
// when the product is waited for.
#pragma once

#include <kernelcat/mbarrier.cuh>

namespace kernelcat {

constexpr int kWgmmaM = 64;
constexpr int kWgmmaK = 16;
constexpr int kRowBytes = 128;

inline uint64_t swizzled_rows_descriptor(uint32_t shared_address) {
  host::require(shared_address % 1024 == 0, "an operand is not aligned to 1024 bytes");
  return shared_address >> 4;
}
// Rows of k: chunks of 64 columns, which lie `chunk_bytes` apart.
inline uint64_t swizzled_values_descriptor(uint32_t shared_address, uint32_t chunk_bytes) {
  return swizzled_rows_descriptor(shared_address) | static_cast<uint64_t>(chunk_bytes) << 32;
}
inline uint64_t advanced(uint64_t descriptor, uint32_t num_bytes) {
  return descriptor + (num_bytes >> 4);
}

// The bytes of a row of an operand, from byte `offset` on, in the 128-byte swizzle.
inline const uint8_t* operand_bytes(uint64_t descriptor, int row, int offset) {
  const uint32_t address = static_cast<uint32_t>(descriptor << 4) + row * kRowBytes + offset;
  return dynamic_shared + (address ^ (address >> 3 & 0x70));
}

inline void wgmma_fence() {
  __syncwarp();
}
inline void wgmma_commit() {
  host::current->products.emplace_back();
}
template <int kPending>
void wgmma_wait() {
  __syncwarp();
  auto& groups = host::current->products;
  while (groups.size() > kPending + 1) {
    for (const auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
  __syncwarp();  // no lane changes an operand in registers before all lanes have read it
}

template <typename Registers>
void pin(Registers&) {}

// A thread's accumulators of a (64 x kDepth) @ b^T (N x kDepth).
template <typename T, int N, int kDepth>
void compute_products(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate, int thread) {
  const auto value = [](uint64_t operand, int row, int k) {
    return to_float(*reinterpret_cast<const T*>(operand_bytes(operand, row, k * sizeof(T))));
  };
  for (int half = 0; half < 2; ++half) {
    float left[kDepth];
    const int row = thread % 128 / 32 * 16 + thread % 32 / 4 + half * 8;
    for (int k = 0; k < kDepth; ++k) left[k] = value(a, row, k);
    for (int block = 0; block < N / 8; ++block) {
      for (int i = 0; i < 2; ++i) {
        float& sum = d[block * 4 + half * 2 + i];
        if (!accumulate) sum = 0.0f;
        for (int k = 0; k < kDepth; ++k) {
          sum += left[k] * value(b, block * 8 + thread % 4 * 2 + i, k);
        }
      }
    }
  }
}

template <typename T, int N>
struct Wgmma {
  static void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
    const int thread = host::current->thread;
    host::current->products.back().push_back(
        [=, &d] { compute_products<T, N, kWgmmaK>(d, a, b, accumulate, thread); });
  }
};

}  // namespace kernelcat

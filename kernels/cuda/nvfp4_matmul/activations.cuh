// A block's columns of A, in shared memory once, as operands of the products.
#pragma once

#include <kernelcat/async_copy.cuh>
#include <kernelcat/fp8.cuh>
#include <kernelcat/mbarrier.cuh>
#include <kernelcat/sync.cuh>
#include <kernelcat/widen.cuh>

namespace kernelcat {

// What A is multiplied as: float8 becomes bfloat16, which holds all of it.
template <typename T>
struct OperandType {
  using Type = T;
};
template <>
struct OperandType<float8_e4m3fn> {
  using Type = bfloat16;
};

// Between rows, so that eight of them lie in different banks.
constexpr int kRowPadding = 16;

__host__ __device__ constexpr uint32_t row_pitch(int cols) {
  return cols * 2 + kRowPadding;
}

// Starts to copy columns [first, first + cols) of A (m, k), zeros past k; `cols` is a multiple of
// 64. A barrier of the block must follow wait_async_copies<0>().
template <typename T>
__device__ __forceinline__ void stage_activations(uint8_t* shared, const T* a, int m, int k,
                                                  int first, int cols) {
  constexpr int kUnit = 16 / sizeof(T);
  const int units = cols / kUnit;
  for (int i = threadIdx.x; i < m * units; i += blockDim.x) {
    const int row = i / units, col = (i - row * units) * kUnit;
    const bool is_inside = first + col < k;
    const T* source = a + static_cast<int64_t>(row) * k + (is_inside ? first + col : 0);
    uint8_t* target = shared + row * row_pitch(cols) + col * 2;
    if constexpr (sizeof(T) == 2) {
      async_copy_16(shared_address(target), source, is_inside);
    } else {
      uint32_t words[8] = {};
      const T* values = source;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (is_inside) {
          words[j] = pack<bfloat16>(to_float(values[2 * j]), to_float(values[2 * j + 1]));
        }
      }
      uint4* both = reinterpret_cast<uint4*>(target);
      both[0] = {words[0], words[1], words[2], words[3]};
      both[1] = {words[4], words[5], words[6], words[7]};
    }
  }
  commit_async_copies();
}

}  // namespace kernelcat

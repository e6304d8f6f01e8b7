// A thread block's columns of A as right operands of mma.sync, which stay in shared memory.
#pragma once

#include <kernelcat/async_copy.cuh>
#include <kernelcat/fp8.cuh>
#include <kernelcat/mbarrier.cuh>
#include <kernelcat/sync.cuh>
#include <kernelcat/widen.cuh>

namespace kernelcat {

// The type in which A is multiplied: float8 becomes bfloat16, which represents every float8.
template <typename T>
struct OperandType {
  using Type = T;
};
template <>
struct OperandType<float8_e4m3fn> {
  using Type = bfloat16;
};

// Bytes after each row, so that ldmatrix reads eight rows from different banks.
constexpr int kRowPadding = 16;

// Bytes from one row to the next.
__host__ __device__ constexpr uint32_t row_pitch(int cols) {
  return cols * 2 + kRowPadding;
}

// Starts to copy columns [first, first + cols) of `a` (m, k) to `shared` (m, row_pitch(cols)
// bytes), with zeros in columns from k on; `cols` is a multiple of 64. After
// wait_async_copies<0>(), a barrier of the thread block must follow.
template <typename T>
__device__ __forceinline__ void stage_activations(uint8_t* shared, const T* a, int m, int k,
                                                  int first, int cols) {
  constexpr int kVector = 16 / sizeof(T);  // elements
  const int row_vectors = cols / kVector;
  for (int i = threadIdx.x; i < m * row_vectors; i += blockDim.x) {
    const int row = i / row_vectors, col = (i - row * row_vectors) * kVector;
    const bool is_inside = first + col < k;
    const T* source = a + static_cast<int64_t>(row) * k + (is_inside ? first + col : 0);
    uint8_t* target = shared + row * row_pitch(cols) + col * 2;
    if constexpr (sizeof(T) == 2) {
      async_copy_16(shared_address(target), source, is_inside);
    } else {
      uint32_t words[8] = {};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (is_inside) {
          words[j] = pack<bfloat16>(to_float(source[2 * j]), to_float(source[2 * j + 1]));
        }
      }
      uint4* vectors = reinterpret_cast<uint4*>(target);
      vectors[0] = {words[0], words[1], words[2], words[3]};
      vectors[1] = {words[4], words[5], words[6], words[7]};
    }
  }
  commit_async_copies();
}

}  // namespace kernelcat

// kernels/cuda/include/kernelcat/mma.cuh on the host: products of 16-bit elements, and
// 8x8 matrices of them.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// d += a @ b^T, a 16 x k, b 8 x k, where a lane has kWidth adjacent elements of Element in a
// register: columns (lane % 4) * kWidth on, and with the upper registers k / 2 columns further.
template <typename Element, int kWidth>
void multiply_fragments(float (&d)[4], const uint32_t (&a)[4], uint32_t b_low, uint32_t b_high) {
  std::vector<uint32_t> left[4], right[2];
  for (int i = 0; i < 4; ++i) left[i] = host::exchange(a[i]);
  right[0] = host::exchange(b_low);
  right[1] = host::exchange(b_high);
  const int lane = host::current->thread % 32;
  const auto value = [](uint32_t word, int i) {
    Element elements[kWidth];
    std::memcpy(elements, &word, 4);
    return static_cast<float>(elements[i]);
  };
  for (int v = 0; v < 4; ++v) {
    const int row = lane / 4, half = v / 2, col = lane % 4 * 2 + v % 2;
    for (int part = 0; part < 2; ++part) {
      for (int q = 0; q < 4; ++q) {
        for (int i = 0; i < kWidth; ++i) {
          d[v] += value(left[part * 2 + half][row * 4 + q], i) * value(right[part][col * 4 + q], i);
        }
      }
    }
  }
}

template <typename T>
void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b_low, uint32_t b_high) {
  multiply_fragments<T, 2>(d, a, b_low, b_high);
}

// The word of an 8x8 matrix that a lane holds: columns 2 * (lane % 4) and the next of row lane / 4.
// `addresses` are those of the rows of all matrices.
inline uint8_t* matrix_word(const std::vector<uint32_t>& addresses, int matrix) {
  const int lane = host::current->thread % 32;
  return dynamic_shared + addresses[8 * matrix + lane / 4] + lane % 4 * 4;
}

inline void load_matrices(uint32_t (&matrices)[4], uint32_t shared_address) {
  const std::vector<uint32_t> addresses = host::exchange(shared_address);
  for (int i = 0; i < 4; ++i) std::memcpy(&matrices[i], matrix_word(addresses, i), 4);
  __syncwarp();
}

// A lane's word of matrix `i` has elements 2 * (lane % 4) and the next one of row lane / 4. Lane 8 *
// i + r has the address of row r.
template <bool kTranspose = false, size_t kCount>
void store_matrices(uint32_t shared_address, const uint32_t (&matrices)[kCount]) {
  const auto addresses = host::exchange(shared_address);
  const int lane = host::current->thread % 32, row = lane / 4, col = lane % 4 * 2;
  for (size_t i = 0; i < kCount; ++i) {
    for (int half = 0; half < 2; ++half) {
      const auto element = static_cast<uint16_t>(matrices[i] >> 16 * half);
      const int target_row = kTranspose ? col + half : row, target_col = kTranspose ? row : col + half;
      std::memcpy(dynamic_shared + addresses[i * 8 + target_row] + 2 * target_col, &element, 2);
    }
  }
  __syncwarp();
}

}  // namespace kernelcat

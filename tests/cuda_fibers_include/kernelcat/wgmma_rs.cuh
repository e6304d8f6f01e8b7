// kernels/cuda/include/kernelcat/wgmma_rs.cuh on the host. The lanes of a warp read each other's
// operands when products are waited for, as tensor cores read registers late.
#pragma once

#include <kernelcat/wgmma.cuh>

namespace kernelcat {

enum class OperandB { kRowsOfN, kRowsOfK };

// The operand registers of a warp's lanes: what each lane has given, product after product.
inline const uint32_t* given_operands[32][32][1 << 12];  // [warp][lane][product % size]

template <typename T, int N, OperandB kLayout>
struct WgmmaRs {
  // Element (column, k) of the second operand.
  static float element(uint64_t b, int column, int k) {
    const uint8_t* bytes = operand_bytes(b, column, k * sizeof(T));
    if constexpr (kLayout == OperandB::kRowsOfK) {
      constexpr int kColumns = kRowBytes / sizeof(T);  // of a chunk
      const uint64_t chunk = b + column / kColumns * (b >> 32 >> 4);
      bytes = operand_bytes(chunk & 0xffffffff, k, column % kColumns * sizeof(T));
    }
    return to_float(*reinterpret_cast<const T*>(bytes));
  }

  static void multiply(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    const int thread = host::current->thread, warp = thread / 32;
    const int number = host::current->num_operands++ % (1 << 12);
    given_operands[warp][thread % 32][number] = a;
    host::current->products.back().push_back([=, &d] {
      for (int half = 0; half < 2; ++half) {
        float left[kWgmmaK];  // of row lane / 4 + 8 * half
        for (int k = 0; k < kWgmmaK; ++k) {
          const int lane = thread % 32 / 4 * 4 + k % 8 / 2;
          const uint32_t word = given_operands[warp][lane][number][k / 8 * 2 + half];
          const uint16_t bits = word >> k % 2 * 16;
          T value;
          std::memcpy(&value, &bits, 2);
          left[k] = to_float(value);
        }
        for (int block = 0; block < N / 8; ++block) {
          for (int i = 0; i < 2; ++i) {
            float& sum = d[block * 4 + half * 2 + i];
            if (!accumulate) sum = 0.0f;
            for (int k = 0; k < kWgmmaK; ++k) {
              sum += left[k] * element(b, block * 8 + thread % 4 * 2 + i, k);
            }
          }
        }
      }
    });
  }
};

}  // namespace kernelcat

// Rearrangement of 8x8 matrices of 16-bit elements that a warp holds in registers, without shared
// memory. Lane l holds columns 2 * (l % 4) + {0, 1} of row l / 4, as mma.sync and wgmma leave them.
#pragma once

#include <kernelcat/sync.cuh>

namespace kernelcat {

// Whole rows of 16 bytes out of four matrices: lane l returns row l / 4 of matrix l % 4.
__device__ __forceinline__ uint4 gather_rows(const uint32_t (&matrices)[4]) {
  const int lane = lane_index();
  const bool is_odd = lane & 1, is_high = lane & 2;
  // An even lane and the odd one beside it exchange their words of odd and even matrices; then
  // lanes two apart exchange those of the first and the last two matrices.
  uint32_t halves[2][2];  // [matrix / 2][column pair of the two lanes]
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t retained = is_odd ? matrices[2 * i + 1] : matrices[2 * i];
    const uint32_t sent = is_odd ? matrices[2 * i] : matrices[2 * i + 1];
    const uint32_t received = __shfl_xor_sync(0xffffffff, sent, 1);
    halves[i][0] = is_odd ? received : retained;
    halves[i][1] = is_odd ? retained : received;
  }
  uint32_t retained[2], received[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    retained[i] = is_high ? halves[1][i] : halves[0][i];
    received[i] = __shfl_xor_sync(0xffffffff, is_high ? halves[0][i] : halves[1][i], 2);
  }
  return is_high ? make_uint4(received[0], received[1], retained[0], retained[1])
                 : make_uint4(retained[0], retained[1], received[0], received[1]);
}

// The transpose of a matrix.
__device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

}  // namespace kernelcat

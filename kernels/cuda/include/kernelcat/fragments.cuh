// Rearranging 8x8 matrices of 16-bit elements that a warp holds in registers, without shared
// memory. Lane l holds columns 2 * (l % 4) + {0, 1} of row l / 4, as mma and wgmma leave them.
#pragma once

#include <kernelcat/sync.cuh>

namespace kernelcat {

// Four matrices in; out, whole 16-byte rows: lane l gets row l / 4 of matrix l % 4.
__device__ __forceinline__ uint4 gather_rows(const uint32_t (&matrices)[4]) {
  const int lane = lane_index();
  const bool odd = lane & 1, high = lane & 2;
  // Neighbours exchange matrices of the other's phase; then pairs of neighbours do.
  uint32_t halves[2][2];  // [matrix / 2][column pair of this pair of lanes]
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t kept = odd ? matrices[2 * i + 1] : matrices[2 * i];
    const uint32_t sent = odd ? matrices[2 * i] : matrices[2 * i + 1];
    const uint32_t got = __shfl_xor_sync(0xffffffff, sent, 1);
    halves[i][0] = odd ? got : kept;
    halves[i][1] = odd ? kept : got;
  }
  uint32_t own[2], other[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    own[i] = high ? halves[1][i] : halves[0][i];
    other[i] = __shfl_xor_sync(0xffffffff, high ? halves[0][i] : halves[1][i], 2);
  }
  return high ? make_uint4(other[0], other[1], own[0], own[1])
              : make_uint4(own[0], own[1], other[0], other[1]);
}

// Rows become columns.
__device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

}  // namespace kernelcat

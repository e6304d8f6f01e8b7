// Copies rows with 16-byte loads and stores; every thread has several in flight.
#include "copy_rows.cuh"

namespace kernelcat {

// The launch bounds cap registers so that an SM holds 768 threads: with four vectors each, they
// have 48 KB in flight.
template <int kThreads, int kUnroll, bool kStreaming>
__global__ void __launch_bounds__(kThreads, 768 / kThreads)
    tma_copy_vectorized(const uint8_t* src, uint8_t* dst, int64_t num_rows, int64_t row_bytes,
                        int64_t src_stride, int64_t dst_stride, int num_lanes) {
  const Rows rows = {.src = src,
                     .dst = dst,
                     .num_rows = num_rows,
                     .row_bytes = row_bytes,
                     .src_stride = src_stride,
                     .dst_stride = dst_stride};
  copy_rows<kThreads, kUnroll, kStreaming>(rows, num_lanes);
}

}  // namespace kernelcat

// Copies rows with 16-byte loads and stores, several in flight a thread.
#include <kernelcat/copy_rows.cuh>

namespace kernelcat {

// Registers are capped so that an SM has 48 KB in flight or more: 768 threads with four vectors
// each.
template <int kThreads, int kUnroll, bool kStreaming>
__global__ void __launch_bounds__(kThreads, 768 / kThreads)
    tma_copy_vectorized(const uint8_t* src, uint8_t* dst, int64_t rows, int64_t row_bytes,
                        int64_t src_stride, int64_t dst_stride, int num_lanes) {
  copy_rows<kThreads, kUnroll, kStreaming>({src, dst, rows, row_bytes, src_stride, dst_stride},
                                           num_lanes);
}

}  // namespace kernelcat

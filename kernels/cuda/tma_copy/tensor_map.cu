// Copies boxes of a matrix by tensor maps: the hardware applies strides and clips boxes at edges.
#include "copy_ring.cuh"

namespace kernelcat {

// A box is box_cols x box_rows elements, box_bytes in all, at most kTileBytes; boxes are numbered
// along the rows first. Maps end at a multiple of 16 bytes, because a TMA store writes whole units
// of 16 bytes, zeros past the edge included. The tail that the maps leave out, bytes [tail_offset,
// tail_offset + tail_bytes) of each of the first tail_rows rows, is copied byte by byte by all
// warps but the first.
template <int kTileBytes, int kNumStages, bool kEvictFirst>
__global__ void __launch_bounds__(128)
    tma_copy_tensor_map(const __grid_constant__ TensorMap src_map,
                        const __grid_constant__ TensorMap dst_map, const uint8_t* src, uint8_t* dst,
                        int64_t tail_offset, int64_t tail_rows, int64_t tail_bytes,
                        int64_t src_stride, int64_t dst_stride, int box_cols, int box_rows,
                        int box_bytes, int64_t num_boxes, int64_t boxes_per_row) {
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ Barrier barriers[kNumStages];

  if (threadIdx.x >= kWarpThreads) {
    const int64_t num_threads = static_cast<int64_t>(gridDim.x) * (blockDim.x - kWarpThreads);
    for (int64_t i = static_cast<int64_t>(threadIdx.x - kWarpThreads) * gridDim.x + blockIdx.x;
         i < tail_rows * tail_bytes; i += num_threads) {
      const int64_t row = i / tail_bytes, byte = tail_offset + i % tail_bytes;
      dst[row * dst_stride + byte] = src[row * src_stride + byte];
    }
  }
  if (threadIdx.x != 0) return;

  for (Barrier& barrier : barriers) barrier.init(1);
  fence_barrier_init();
  const uint64_t policy = kEvictFirst ? evict_first_policy() : evict_normal_policy();
  const int64_t block_boxes = ceil_div<int64_t>(num_boxes - blockIdx.x, gridDim.x);
  const auto col_of = [&](int64_t box) { return static_cast<int>(box % boxes_per_row) * box_cols; };
  const auto row_of = [&](int64_t box) { return static_cast<int>(box / boxes_per_row) * box_rows; };
  copy_through_ring<kNumStages, kNumStages / 2>(
      barriers, block_boxes,
      [&](int64_t tile, int stage, Barrier& barrier) {
        const int64_t box = blockIdx.x + tile * gridDim.x;
        barrier.arrive_expect(box_bytes);
        tensor_load(stages + stage * kTileBytes, src_map, col_of(box), row_of(box), barrier,
                    policy);
      },
      [&](int64_t tile, int stage) {
        const int64_t box = blockIdx.x + tile * gridDim.x;
        tensor_store(dst_map, stages + stage * kTileBytes, col_of(box), row_of(box), policy);
      });
}

}  // namespace kernelcat

// Copies one span with the bulk copy engine: from global to shared memory and back, without passing
// through registers.
#include "copy_ring.cuh"
#include "copy_rows.cuh"

namespace kernelcat {

// The span's ends are copied byte by byte: up to the first multiple of kAlignment bytes in `dst`,
// and after the last whole 16 bytes.
constexpr int kAlignment = 128;

template <int kTileBytes, int kNumStages, bool kEvictFirst>
__global__ void __launch_bounds__(kAlignment)
    tma_copy_bulk(const uint8_t* src, uint8_t* dst, int64_t num_bytes) {
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ Barrier barriers[kNumStages];

  const uint64_t skew = reinterpret_cast<uint64_t>(src) - reinterpret_cast<uint64_t>(dst);
  if (skew % 16 != 0) {  // the copy engine moves whole units of 16 bytes only
    const Rows span = {.src = src,
                       .dst = dst,
                       .num_rows = 1,
                       .row_bytes = num_bytes,
                       .src_stride = 0,
                       .dst_stride = 0};
    copy_rows<kAlignment, 4, kEvictFirst>(span, kAlignment);
    return;
  }

  const int64_t to_aligned = -reinterpret_cast<uint64_t>(dst) & (kAlignment - 1);
  const int64_t head_bytes = to_aligned < num_bytes ? to_aligned : num_bytes;
  const int64_t body_bytes = (num_bytes - head_bytes) & ~int64_t{15};
  if (blockIdx.x == 0) {
    const int64_t tail = head_bytes + body_bytes + threadIdx.x;
    if (threadIdx.x < head_bytes) dst[threadIdx.x] = src[threadIdx.x];
    if (tail < num_bytes) dst[tail] = src[tail];
  }
  if (threadIdx.x != 0) return;

  for (Barrier& barrier : barriers) barrier.init(1);
  fence_barrier_init();
  const uint64_t policy = kEvictFirst ? evict_first_policy() : evict_normal_policy();
  const int64_t grid_tiles = ceil_div<int64_t>(body_bytes, kTileBytes);
  const int64_t block_tiles = ceil_div<int64_t>(grid_tiles - blockIdx.x, gridDim.x);
  const auto offset_of = [&](int64_t tile) { return (blockIdx.x + tile * gridDim.x) * kTileBytes; };
  const auto bytes_of = [&](int64_t tile) {
    const int64_t bytes_left = body_bytes - offset_of(tile);
    return static_cast<uint32_t>(bytes_left < kTileBytes ? bytes_left : kTileBytes);
  };
  copy_through_ring<kNumStages, kNumStages / 2>(
      barriers, block_tiles,
      [&](int64_t tile, int stage, Barrier& barrier) {
        barrier.arrive_expect(bytes_of(tile));
        bulk_load(stages + stage * kTileBytes, src + head_bytes + offset_of(tile), bytes_of(tile),
                  barrier, policy);
      },
      [&](int64_t tile, int stage) {
        bulk_store(dst + head_bytes + offset_of(tile), stages + stage * kTileBytes, bytes_of(tile),
                   policy);
      });
}

}  // namespace kernelcat

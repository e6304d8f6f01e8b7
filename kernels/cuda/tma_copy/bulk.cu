// Copies one span with the bulk copy engine: global to shared memory and back, no registers
// between.
#include <kernelcat/copy_ring.cuh>
#include <kernelcat/copy_rows.cuh>

namespace kernelcat {

// The span's ends, up to the first multiple of kAlignment and from the last one on, byte by byte.
constexpr int kAlignment = 128;

template <int kTileBytes, int kNumStages, bool kEvictFirst>
__global__ void __launch_bounds__(kAlignment)
    tma_copy_bulk(const uint8_t* src, uint8_t* dst, int64_t num_bytes) {
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ Barrier barriers[kNumStages];

  const uint64_t skew = reinterpret_cast<uint64_t>(src) - reinterpret_cast<uint64_t>(dst);
  if (skew % 16 != 0) {  // the copy engine moves 16-byte units only
    copy_rows<kAlignment, 4, kEvictFirst>({src, dst, 1, num_bytes, 0, 0}, kAlignment);
    return;
  }

  const int64_t to_aligned = -reinterpret_cast<uint64_t>(dst) & (kAlignment - 1);
  const int64_t head = to_aligned < num_bytes ? to_aligned : num_bytes;
  const int64_t body = (num_bytes - head) & ~int64_t{15};
  if (blockIdx.x == 0) {
    const int64_t tail = head + body + threadIdx.x;
    if (threadIdx.x < head) dst[threadIdx.x] = src[threadIdx.x];
    if (tail < num_bytes) dst[tail] = src[tail];
  }
  if (threadIdx.x != 0) return;

  for (Barrier& barrier : barriers) barrier.init(1);
  fence_barrier_init();
  const uint64_t policy = kEvictFirst ? evict_first_policy() : evict_normal_policy();
  const int64_t all_tiles = ceil_div<int64_t>(body, kTileBytes);
  const int64_t my_tiles = ceil_div<int64_t>(all_tiles - blockIdx.x, gridDim.x);
  const auto offset_of = [&](int64_t tile) { return (blockIdx.x + tile * gridDim.x) * kTileBytes; };
  const auto bytes_of = [&](int64_t tile) {
    const int64_t rest = body - offset_of(tile);
    return static_cast<uint32_t>(rest < kTileBytes ? rest : kTileBytes);
  };
  copy_through_ring<kNumStages, kNumStages / 2>(
      barriers, my_tiles,
      [&](int64_t tile, int stage, Barrier& barrier) {
        barrier.arrive_expect(bytes_of(tile));
        bulk_load(stages + stage * kTileBytes, src + head + offset_of(tile), bytes_of(tile),
                  barrier, policy);
      },
      [&](int64_t tile, int stage) {
        bulk_store(dst + head + offset_of(tile), stages + stage * kTileBytes, bytes_of(tile),
                   policy);
      });
}

}  // namespace kernelcat

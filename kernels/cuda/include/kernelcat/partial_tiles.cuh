// Partial sums of a tile that several warpgroups share: each stores its own, one adds up all.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// A thread's sums of kNumTiles tiles of 64 rows, as vectors of four. Vector v of a tile lies at
// address + v * kWarpgroupThreads of what `partial(part, tile)` returns.
//
// Vectors are moved kInFlight at a time: asked for one by one, each would wait for L2. More than
// fit in registers beside the sums would spill. Only sums inside the result are needed, those of
// the first `num_tiles_inside` tiles and of their kCount sums the first `num_sums_inside`; of the
// last kInFlight vectors with such sums all are moved, and what the others hold has no meaning.
template <int kNumTiles, int kCount>
struct PartialTiles {
  using Sums = float[kNumTiles][kCount];
  static constexpr int kSums = kNumTiles * kCount, kVectors = kCount / 4;
  static constexpr int kRoom = kSums <= 96 ? 12 : kSums <= 128 ? 6 : 8;
  static constexpr int kInFlight = kVectors < kRoom ? kVectors : kRoom;

  int num_tiles_inside, num_sums_inside;

  // Calls `move(tile, first)` for the first vector of each kInFlight that have sums inside.
  template <typename Move>
  __device__ __forceinline__ void for_each(Move move) const {
#pragma unroll
    for (int tile = 0; tile < kNumTiles; ++tile) {
      if (tile >= num_tiles_inside) continue;
#pragma unroll
      for (int first = 0; first < kVectors; first += kInFlight) {
        if (4 * first < num_sums_inside) move(tile, first);
      }
    }
  }

  template <typename Partial>
  __device__ __forceinline__ void store(const Sums& sums, Partial partial, int part) const {
    for_each([&](int tile, int first) {
      float4* target = partial(part, tile);
#pragma unroll
      for (int v = first; v < first + kInFlight && v < kVectors; ++v) {
        const float* z = &sums[tile][4 * v];
        __stcg(target + v * kWarpgroupThreads, float4{z[0], z[1], z[2], z[3]});
      }
    });
  }

  // Adds the partial sums of parts begin .. end - 1 to `sums`, in this order.
  template <typename Partial>
  __device__ __forceinline__ void add(Sums& sums, Partial partial, int begin, int end) const {
#pragma unroll 1
    for (int part = begin; part < end; ++part) {
      for_each([&](int tile, int first) {
        const float4* source = partial(part, tile);
        float4 vectors[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight && first + i < kVectors; ++i) {
          vectors[i] = __ldcg(source + (first + i) * kWarpgroupThreads);
        }
#pragma unroll
        for (int i = 0; i < kInFlight && first + i < kVectors; ++i) {
          float* z = &sums[tile][4 * (first + i)];
          z[0] += vectors[i].x, z[1] += vectors[i].y, z[2] += vectors[i].z, z[3] += vectors[i].w;
        }
      });
    }
  }
};

}  // namespace kernelcat

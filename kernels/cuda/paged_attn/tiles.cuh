// Tiles of queries, keys and values in shared memory: where their elements lie, and how mma.sync
// reads them, those of 8 and 4 bits included.
#pragma once

#include <kernelcat/mma.cuh>

#include "attention.cuh"
#include "widen.cuh"

namespace kernelcat {

// Rows of kUnits 16-byte units, swizzled within 128 bytes so that eight rows' equal units lie in
// different banks. What is beyond 128 bytes is kept apart: it becomes an instruction's offset.
template <int kUnits>
__device__ __forceinline__ uint32_t place_in_tile(int row, int unit) {
  static_assert(kUnits % 8 == 0 || kUnits == 4 || kUnits == 2);
  const int mask = kUnits < 8 ? row / (8 / kUnits) % kUnits : row % 8;
  return row * (kUnits * 16) + (unit % 8 ^ mask) * 16 + unit / 8 * 128;
}

// As load_matrices, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&matrices)[4],
                                                         uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared_address)
               : "memory");
}

// Elements of a row of queries are in such an order that a float8 unit, which mma.sync takes as
// two steps of 16 elements, needs no exchange between lanes: a lane's four neighbouring elements
// of keys meet the same four of queries. Of a group of 16, elements 4j + {0, 1} lie in unit 0 and
// 4j + {2, 3} in unit 1. A unit of NVFP4 is four steps, of a lane's eight neighbours: of a group of
// 32, elements 8j + i and 8j + i + 4 lie in unit i.
template <typename Kind>
struct QueryTile {
  static constexpr int kUnits = Kind::kHeadDim / 8;

  static __device__ __forceinline__ void store(uint8_t* tile, int row, int unit, uint4 eight) {
    if constexpr (kIsFloat8<typename Kind::Cached>) {
      const int even = unit & ~1, half = unit % 2 * 8;
      *reinterpret_cast<uint2*>(tile + place_in_tile<kUnits>(row, even) + half) = {eight.x,
                                                                                   eight.z};
      *reinterpret_cast<uint2*>(tile + place_in_tile<kUnits>(row, even + 1) + half) = {eight.y,
                                                                                       eight.w};
    } else if constexpr (kIsNvfp4<typename Kind::Cached>) {
      const uint32_t pairs[4] = {
          __byte_perm(eight.x, eight.z, 0x5410), __byte_perm(eight.x, eight.z, 0x7632),
          __byte_perm(eight.y, eight.w, 0x5410), __byte_perm(eight.y, eight.w, 0x7632)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t place = place_in_tile<kUnits>(row, (unit & ~3) + i) + unit % 4 * 4;
        *reinterpret_cast<uint32_t*>(tile + place) = pairs[i];
      }
    } else {
      *reinterpret_cast<uint4*>(tile + place_in_tile<kUnits>(row, unit)) = eight;
    }
  }

  // The 16 x 16 operand of rows `row` .. and of the elements of units 2 * step and 2 * step + 1.
  static __device__ __forceinline__ void load(uint32_t (&a)[4], uint32_t tile, int row, int step) {
    const int lane = threadIdx.x % kWarpThreads;
    load_matrices(a, tile + place_in_tile<kUnits>(row + lane % 16, 2 * step + lane / 16));
  }
};

template <bool kFirst, typename First, typename Second>
struct Either {
  using Type = First;
};
template <typename First, typename Second>
struct Either<false, First, Second> {
  using Type = Second;
};

// A tile of BLOCK_N tokens x head_dim in the cache's type, and the tokens' scales, in shared
// memory.
struct ScaledTile {
  uint32_t address;
  const float* scales;          // (BLOCK_N,) where pages have their own
  const uint8_t* block_scales;  // (BLOCK_N, head_dim / 16) of NVFP4
};

// Tiles are read in blocks of 16 tokens x two units: kSteps steps of 16 elements of keys, 2 *
// kSteps columns of 8 values.
template <typename Kind>
struct CacheTile {
  using T = typename Kind::T;
  using Cached = typename Kind::Cached;
  static constexpr int kUnits = Kind::kRowBytes / 16;
  static constexpr int kBlocks = kUnits / 2;
  static constexpr int kSteps = Kind::kHeadDim / (16 * kBlocks);
  // What weights and values are multiplied in. Float16 holds all values of NVFP4, and of weights
  // of at most 1 it keeps more than bfloat16.
  using Weight =
      typename Either<kIsNvfp4<Cached> && Kind::kScales != Scales::kPage, float16, T>::Type;

  // Operands b of scores: [step][tokens / 8][low, high].
  static __device__ __forceinline__ void load_keys(uint32_t (&b)[kSteps][2][2],
                                                   const ScaledTile& tile, int token, int block) {
    const int lane = threadIdx.x % kWarpThreads;
    uint32_t words[4];  // tokens 0-7 of both units, then tokens 8-15
    load_matrices(words, tile.address + place_in_tile<kUnits>(token + lane / 16 * 8 + lane % 8,
                                                              2 * block + lane / 8 % 2));
#pragma unroll
    for (int tokens = 0; tokens < 2; ++tokens) {
      uint32_t scales = 0;
      if constexpr (kIsNvfp4<Cached>) {
        const uint32_t four = block_scales(tile, token + tokens * 8 + lane / 4, block);
        scales = widen_scales<T>(__byte_perm(four, 0, lane % 4 < 2 ? 0x2000 : 0x3010));
      }
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) {
        const uint32_t word = words[2 * tokens + unit];
        if constexpr (kIsFloat8<Cached>) {
          b[unit][tokens][0] = widen<T, 0x1404>(word);
          b[unit][tokens][1] = widen<T, 0x3424>(word);
        } else if constexpr (kIsNvfp4<Cached>) {
          uint32_t pairs[4];
          widen_values<T>(pairs, word, __byte_perm(scales, 0, unit == 0 ? 0x1010 : 0x3232));
#pragma unroll
          for (int i = 0; i < 4; ++i) b[2 * unit + i / 2][tokens][i % 2] = pairs[i];
        } else {
          b[0][tokens][unit] = word;
        }
      }
    }
  }

  // Operands b of the result: [columns][low, high]. Of float8, a unit's even columns, then its odd
  // ones: two of a lane's neighbouring bytes belong to the same token. Of NVFP4, every fourth
  // column from the first, second, third and fourth on.
  static __device__ __forceinline__ void load_values(uint32_t (&b)[2 * kSteps][2],
                                                     const ScaledTile& tile, int token, int block) {
    const int lane = threadIdx.x % kWarpThreads;
    uint32_t words[4];  // tokens 0-7 and 8-15 of a unit, then of the other
    load_matrices_transposed(
        words, tile.address + place_in_tile<kUnits>(token + lane % 16, 2 * block + lane / 16));
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
      for (int tokens = 0; tokens < 2; ++tokens) {
        const uint32_t word = words[2 * unit + tokens];
        if constexpr (kIsFloat8<Cached>) {
          b[2 * unit][tokens] = widen<T, 0x2404>(word);
          b[2 * unit + 1][tokens] = widen<T, 0x3414>(word);
        } else if constexpr (kIsNvfp4<Cached>) {
          const int first = token + tokens * 8 + lane % 4 * 2;  // of a pair of tokens
          const uint32_t scales = widen_scales<Weight>(
              __byte_perm(block_scales(tile, first, block), block_scales(tile, first + 1, block),
                          (unit == 0 ? 0x4000 : 0x6020) + lane / 16 * 0x1010));
          uint32_t pairs[4];
          widen_values<Weight>(pairs, word, scales);
#pragma unroll
          for (int i = 0; i < 4; ++i) b[4 * unit + i][tokens] = pairs[i];
        } else {
          b[unit][tokens] = word;
        }
      }
    }
  }

 private:
  // The four of a token's units in `block`, two a unit.
  static __device__ __forceinline__ uint32_t block_scales(const ScaledTile& tile, int token,
                                                          int block) {
    constexpr int kBlockScales = Kind::kHeadDim / kScaledValues;
    return *reinterpret_cast<const uint32_t*>(tile.block_scales + token * kBlockScales + 4 * block);
  }
};

}  // namespace kernelcat

// Tiles of queries, keys and values in shared memory: where their elements lie, and how they become
// operands of mma.sync, also from elements of 8 and 4 bits.
#pragma once

#include <kernelcat/load_transposed.cuh>
#include <kernelcat/mma.cuh>

#include "attention.cuh"

namespace kernelcat {

// Offset of a 16-byte unit in a tile whose rows have kUnits of them. Units are swizzled within 128
// bytes, so that the same unit of eight rows lies in eight different groups of banks. The units
// beyond the first eight add a constant, which becomes part of the instruction.
template <int kUnits>
__device__ __forceinline__ uint32_t swizzled_offset(int row, int unit) {
  static_assert(kUnits % 8 == 0 || kUnits == 4 || kUnits == 2);
  const int mask = kUnits < 8 ? row / (8 / kUnits) % kUnits : row % 8;
  return row * (kUnits * 16) + (unit % 8 ^ mask) * 16 + unit / 8 * 128;
}

// A tile of queries. Its elements are reordered so that no lane needs keys of another lane. A lane
// holds four neighbouring elements of a float8 unit, which mma.sync takes as two steps of 16
// elements: of every 16 query elements, 4j + {0, 1} lie in unit 0 and 4j + {2, 3} in unit 1. An
// NVFP4 unit is four steps, and a lane holds eight neighbours: of every 32 query elements, 8j + i
// and 8j + i + 4 lie in unit i.
template <typename Kind>
struct QueryTile {
  static constexpr int kUnits = Kind::kHeadDim / 8;

  // Stores elements 8 * unit .. 8 * unit + 7 of a row.
  static __device__ __forceinline__ void store(uint8_t* tile, int row, int unit, uint4 elements) {
    if constexpr (kIsFloat8<typename Kind::Cached>) {
      const int even = unit & ~1, half = unit % 2 * 8;
      *reinterpret_cast<uint2*>(tile + swizzled_offset<kUnits>(row, even) + half) = {elements.x,
                                                                                     elements.z};
      *reinterpret_cast<uint2*>(tile + swizzled_offset<kUnits>(row, even + 1) + half) = {
          elements.y, elements.w};
    } else if constexpr (kIsNvfp4<typename Kind::Cached>) {
      const uint32_t pairs[4] = {
          __byte_perm(elements.x, elements.z, 0x5410), __byte_perm(elements.x, elements.z, 0x7632),
          __byte_perm(elements.y, elements.w, 0x5410), __byte_perm(elements.y, elements.w, 0x7632)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t offset = swizzled_offset<kUnits>(row, (unit & ~3) + i) + unit % 4 * 4;
        *reinterpret_cast<uint32_t*>(tile + offset) = pairs[i];
      }
    } else {
      *reinterpret_cast<uint4*>(tile + swizzled_offset<kUnits>(row, unit)) = elements;
    }
  }

  // The 16 x 16 operand of rows `row` .. row + 15 and of units 2 * step and 2 * step + 1.
  static __device__ __forceinline__ void load(uint32_t (&a)[4], uint32_t tile, int row, int step) {
    const int lane = threadIdx.x % kWarpThreads;
    load_matrices(a, tile + swizzled_offset<kUnits>(row + lane % 16, 2 * step + lane / 16));
  }
};

template <bool kCondition, typename IfTrue, typename IfFalse>
struct Conditional {
  using Type = IfTrue;
};
template <typename IfTrue, typename IfFalse>
struct Conditional<false, IfTrue, IfFalse> {
  using Type = IfFalse;
};

// Keys or values of a KV tile in shared memory, (BLOCK_N, head_dim) in the cache's type, with the
// tokens' scales.
struct ScaledTile {
  uint32_t address;             // of the elements
  const float* scales;          // (BLOCK_N,) with Scales::kPage
  const uint8_t* block_scales;  // (BLOCK_N, head_dim / 16) of NVFP4
};

// Reads a KV tile in pieces of 16 tokens x two 16-byte units: a piece of keys is kSteps steps of 16
// elements, a piece of values 2 * kSteps groups of 8 columns.
template <typename Kind>
struct KvOperands {
  using T = typename Kind::T;
  using Cached = typename Kind::Cached;
  static constexpr int kUnits = Kind::kRowBytes / 16;
  static constexpr int kPieces = kUnits / 2;
  static constexpr int kSteps = Kind::kHeadDim / (16 * kPieces);
  // The type in which weights and values are multiplied. Float16 holds every value of NVFP4, and of
  // weights up to 1 it keeps more bits than bfloat16.
  using Weight =
      typename Conditional<kIsNvfp4<Cached> && Kind::kScales != Scales::kPage, float16, T>::Type;

  // Operands b of scores: [step][tokens / 8][low, high].
  static __device__ __forceinline__ void load_keys(uint32_t (&b)[kSteps][2][2],
                                                   const ScaledTile& tile, int token, int piece) {
    const int lane = threadIdx.x % kWarpThreads;
    uint32_t words[4];  // tokens 0-7 of both units, then tokens 8-15
    load_matrices(words, tile.address + swizzled_offset<kUnits>(token + lane / 16 * 8 + lane % 8,
                                                                2 * piece + lane / 8 % 2));
#pragma unroll
    for (int tokens = 0; tokens < 2; ++tokens) {
      uint32_t scales = 0;
      if constexpr (kIsNvfp4<Cached>) {
        const uint32_t four = block_scales(tile, token + tokens * 8 + lane / 4, piece);
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

  // Operands b of the output: [group of 8 columns][low, high]. A float8 unit yields its even
  // columns, then its odd ones, because two neighbouring bytes of a lane belong to the same token.
  // An NVFP4 unit yields every fourth column, beginning with the first, second, third and fourth.
  static __device__ __forceinline__ void load_values(uint32_t (&b)[2 * kSteps][2],
                                                     const ScaledTile& tile, int token, int piece) {
    const int lane = threadIdx.x % kWarpThreads;
    uint32_t words[4];  // tokens 0-7 and 8-15 of the first unit, then of the second
    load_matrices_transposed(
        words, tile.address + swizzled_offset<kUnits>(token + lane % 16, 2 * piece + lane / 16));
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
              __byte_perm(block_scales(tile, first, piece), block_scales(tile, first + 1, piece),
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
  // The four scales of a token's two units in a piece, two a unit.
  static __device__ __forceinline__ uint32_t block_scales(const ScaledTile& tile, int token,
                                                          int piece) {
    constexpr int kTokenScales = Kind::kHeadDim / kNvfp4Block;
    return *reinterpret_cast<const uint32_t*>(tile.block_scales + token * kTokenScales + 4 * piece);
  }
};

}  // namespace kernelcat

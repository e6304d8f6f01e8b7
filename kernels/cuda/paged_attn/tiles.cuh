// Tiles of queries, keys and values in shared memory: where their elements lie, and how mma.sync
// reads them, float8 ones included.
#pragma once

#include <kernelcat/mma.cuh>

#include "attention.cuh"

namespace kernelcat {

// Rows of kUnits 16-byte units, swizzled within 128 bytes so that eight rows' equal units lie in
// different banks. What is beyond 128 bytes is kept apart: it becomes an instruction's offset.
template <int kUnits>
__device__ __forceinline__ uint32_t place_in_tile(int row, int unit) {
  static_assert(kUnits % 8 == 0 || kUnits == 4);
  const int mask = kUnits == 4 ? row / 2 % 4 : row % 8;
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

template <typename T>
constexpr bool kIsBfloat16 = false;
template <>
constexpr bool kIsBfloat16<bfloat16> = true;

// Two e4m3 values as T, exactly. They are bytes of `word` that kSelector (of prmt) moves to the
// high bytes of a pair, with zeros (byte 4 of prmt's operands) below. Sign, exponent and mantissa
// are put in T's places, which leaves only the exponent's bias to make up for. NaNs become 480.
template <typename T, uint32_t kSelector>
__device__ __forceinline__ uint32_t widen(uint32_t word) {
  constexpr int kShift = kIsBfloat16<T> ? 4 : 1;
  const uint32_t high = __byte_perm(word, 0, kSelector);
  const uint32_t bits = (high & 0x80008000) | ((high & 0x7f007f00) >> kShift);
  uint32_t result;
  if constexpr (kIsBfloat16<T>) {
    // -0 as the addend keeps the sign of a zero. sm_80 has no bfloat16 product by itself.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(result)
        : "r"(bits), "r"(0x7b807b80), "r"(0x80008000));  // 2^120
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(bits), "r"(0x5c005c00));  // 2^8
  }
  return result;
}

// Elements of a row of queries are in such an order that a float8 unit, which mma.sync takes as
// two steps of 16 elements, needs no exchange between lanes: a lane's four neighbouring elements
// of keys meet the same four of queries. Of a group of 16, elements 4j + {0, 1} lie in unit 0 and
// 4j + {2, 3} in unit 1.
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

// Tiles of BLOCK_N tokens x head_dim, in the cache's type. They are read in blocks of 16 tokens x
// two units: kSteps steps of 16 elements of keys, 2 * kSteps columns of 8 values.
template <typename Kind>
struct CacheTile {
  using T = typename Kind::T;
  using Cached = typename Kind::Cached;
  static constexpr int kUnits = Kind::kHeadDim * static_cast<int>(sizeof(Cached)) / 16;
  static constexpr int kBlocks = kUnits / 2;
  static constexpr int kSteps = kIsFloat8<Cached> ? 2 : 1;

  // Operands b of scores: [step][tokens / 8][low, high].
  static __device__ __forceinline__ void load_keys(uint32_t (&b)[kSteps][2][2], uint32_t tile,
                                                   int token, int block) {
    const int lane = threadIdx.x % kWarpThreads;
    uint32_t words[4];  // tokens 0-7 of both units, then tokens 8-15
    load_matrices(words, tile + place_in_tile<kUnits>(token + lane / 16 * 8 + lane % 8,
                                                      2 * block + lane / 8 % 2));
#pragma unroll
    for (int tokens = 0; tokens < 2; ++tokens) {
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) {
        const uint32_t word = words[2 * tokens + unit];
        if constexpr (kIsFloat8<Cached>) {
          b[unit][tokens][0] = widen<T, 0x1404>(word);
          b[unit][tokens][1] = widen<T, 0x3424>(word);
        } else {
          b[0][tokens][unit] = word;
        }
      }
    }
  }

  // Operands b of the result: [columns][low, high]. Of float8, a unit's even columns, then its odd
  // ones: two of a lane's neighbouring bytes belong to the same token.
  static __device__ __forceinline__ void load_values(uint32_t (&b)[2 * kSteps][2], uint32_t tile,
                                                     int token, int block) {
    const int lane = threadIdx.x % kWarpThreads;
    uint32_t words[4];  // tokens 0-7 and 8-15 of a unit, then of the other
    load_matrices_transposed(
        words, tile + place_in_tile<kUnits>(token + lane % 16, 2 * block + lane / 16));
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
      for (int tokens = 0; tokens < 2; ++tokens) {
        const uint32_t word = words[2 * unit + tokens];
        if constexpr (kIsFloat8<Cached>) {
          b[2 * unit][tokens] = widen<T, 0x2404>(word);
          b[2 * unit + 1][tokens] = widen<T, 0x3414>(word);
        } else {
          b[unit][tokens] = word;
        }
      }
    }
  }
};

}  // namespace kernelcat

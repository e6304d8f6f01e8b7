// Copying rows of bytes with ordinary loads and stores, whatever their alignment.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// `rows` rows of `row_bytes` bytes; row r begins at src + r * src_stride and dst + r * dst_stride.
struct Rows {
  const uint8_t* src;
  uint8_t* dst;
  int64_t rows, row_bytes, src_stride, dst_stride;
};

// Fewer bytes than a vector, all in flight at once. Not inlined: inlining it was seen to spill.
template <int kBytes>
__device__ __noinline__ void copy_bytes(const uint8_t* src, uint8_t* dst, int count) {
  uint8_t bytes[kBytes];
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    if (i < count) bytes[i] = src[i];
  }
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    if (i < count) dst[i] = bytes[i];
  }
}

template <typename Vector, bool kStreaming>
__device__ __forceinline__ Vector load(const uint8_t* address) {
  const Vector* vector = reinterpret_cast<const Vector*>(address);
  if constexpr (kStreaming) return __ldcs(vector);
  return *vector;
}

template <typename Vector, bool kStreaming>
__device__ __forceinline__ void store(uint8_t* address, Vector value) {
  Vector* vector = reinterpret_cast<Vector*>(address);
  if constexpr (kStreaming) return __stcs(vector, value);
  *vector = value;
}

// kUnroll vectors of one thread: vector i lies in row `row` + i * row_step, `first` + i * byte_step
// bytes from the row's begin. Rows are cut where addresses are multiples of the vector, so the
// first and the last vector of a row may stick out of it (`first` < 0), and only their inside is
// copied.
template <typename Vector, int kUnroll, bool kStreaming>
__device__ __forceinline__ void copy_pieces(const Rows& rows, int64_t row, int row_step,
                                            int64_t first, int byte_step) {
  constexpr int kBytes = sizeof(Vector);
  const uint8_t* src = rows.src + row * rows.src_stride;
  uint8_t* dst = rows.dst + row * rows.dst_stride;
  const int64_t src_step = row_step * rows.src_stride, dst_step = row_step * rows.dst_stride;
  const auto first_of = [&](int i) { return first + i * byte_step; };
  const auto is_whole = [&](int i) {
    return first_of(i) >= 0 && first_of(i) + kBytes <= rows.row_bytes &&
           row + i * row_step < rows.rows;
  };
  Vector values[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (is_whole(i)) values[i] = load<Vector, kStreaming>(src + i * src_step + first_of(i));
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (is_whole(i)) store<Vector, kStreaming>(dst + i * dst_step + first_of(i), values[i]);
  }
#pragma unroll 1
  for (int i = 0; i < kUnroll; ++i) {
    if (is_whole(i) || row + i * row_step >= rows.rows) continue;
    const int64_t begin = first_of(i) < 0 ? 0 : first_of(i);
    const int64_t inside = rows.row_bytes - begin, count = first_of(i) + kBytes - begin;
    const int64_t least = inside < count ? inside : count;
    copy_bytes<kBytes>(src + i * src_step + begin, dst + i * dst_step + begin,
                       static_cast<int>(least < 0 ? 0 : least));
  }
}

// The grid copies `rows` in tiles of kUnroll vectors a thread. `num_lanes` threads (a power of two)
// work on a row side by side, and the unrolled vectors go down the rows; or all of the block does,
// and they go along the row. Needs (src - dst) % sizeof(Vector) == 0 in every row.
template <typename Vector, int kThreads, int kUnroll, bool kStreaming>
__device__ void copy_vectors(const Rows& rows, int num_lanes) {
  constexpr int kBytes = sizeof(Vector);
  // Going down the rows takes rows that all begin at the same place in a vector.
  const bool down = num_lanes < kThreads && kThreads / num_lanes * rows.src_stride % kBytes == 0;
  const int lanes = down ? num_lanes : kThreads;
  const int row_step = down ? kThreads / num_lanes : 0;
  const int byte_step = down ? 0 : kThreads * kBytes;
  const int64_t tile_rows = down ? kUnroll * row_step : 1;
  const int64_t tile_vectors = down ? num_lanes : kUnroll * kThreads;
  const int64_t num_vectors = ceil_div<int64_t>(rows.row_bytes + kBytes - 1, kBytes);

  for (int64_t row = blockIdx.y * tile_rows; row < rows.rows; row += gridDim.y * tile_rows) {
    const int64_t my_row = row + threadIdx.x / lanes;
    const uint64_t begin = reinterpret_cast<uint64_t>(rows.src + my_row * rows.src_stride);
    const int64_t misalignment = begin % kBytes;
    for (int64_t vector = blockIdx.x * tile_vectors; vector < num_vectors;
         vector += gridDim.x * tile_vectors) {
      const int64_t first = (vector + threadIdx.x % lanes) * kBytes - misalignment;
      copy_pieces<Vector, kUnroll, kStreaming>(rows, my_row, row_step, first, byte_step);
    }
  }
}

// Copies with the widest vectors for which source and destination agree in alignment.
template <int kThreads, int kUnroll, bool kStreaming>
__device__ void copy_rows(const Rows& rows, int num_lanes) {
  const uint64_t skew = reinterpret_cast<uint64_t>(rows.src) - reinterpret_cast<uint64_t>(rows.dst);
  const uint64_t drift = rows.rows > 1 ? rows.src_stride - rows.dst_stride : 0;
  const uint64_t misalignment = (skew | drift) & 15;
  if (misalignment == 0) {
    copy_vectors<uint4, kThreads, kUnroll, kStreaming>(rows, num_lanes);
  } else if (misalignment % 8 == 0) {
    copy_vectors<uint2, kThreads, kUnroll, kStreaming>(rows, num_lanes);
  } else if (misalignment % 4 == 0) {
    copy_vectors<uint32_t, kThreads, kUnroll, kStreaming>(rows, num_lanes);
  } else if (misalignment % 2 == 0) {
    copy_vectors<uint16_t, kThreads, kUnroll, kStreaming>(rows, num_lanes);
  } else {
    copy_vectors<uint8_t, kThreads, kUnroll, kStreaming>(rows, num_lanes);
  }
}

}  // namespace kernelcat

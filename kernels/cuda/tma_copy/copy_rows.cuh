// Copies of rows of bytes, of any alignment, by ordinary loads and stores.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// Row r has `row_bytes` bytes and begins at src + r * src_stride and dst + r * dst_stride.
struct Rows {
  const uint8_t* src;
  uint8_t* dst;
  int64_t num_rows, row_bytes, src_stride, dst_stride;
};

// Copies `count` bytes, at most kBytes, all in flight at once. Not inlined: the inlined function
// was seen to spill registers.
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

// Copies kUnroll vectors of one thread: vector i lies in row `row` + i * row_step, and begins
// `first` + i * byte_step bytes after the row's first byte. Rows are cut at addresses that are
// multiples of the vector's size, so the first and the last vector of a row may reach beyond the
// row
// (`first` < 0); of those vectors only the bytes inside the row are copied.
template <typename Vector, int kUnroll, bool kStreaming>
__device__ __forceinline__ void copy_unrolled(const Rows& rows, int64_t row, int row_step,
                                              int64_t first, int byte_step) {
  constexpr int kBytes = sizeof(Vector);
  const uint8_t* src = rows.src + row * rows.src_stride;
  uint8_t* dst = rows.dst + row * rows.dst_stride;
  const int64_t src_step = row_step * rows.src_stride, dst_step = row_step * rows.dst_stride;
  const auto first_of = [&](int i) { return first + i * byte_step; };
  const auto is_whole = [&](int i) {
    return first_of(i) >= 0 && first_of(i) + kBytes <= rows.row_bytes &&
           row + i * row_step < rows.num_rows;
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
    if (is_whole(i) || row + i * row_step >= rows.num_rows) continue;
    const int64_t begin = first_of(i) < 0 ? 0 : first_of(i);
    const int64_t to_row_end = rows.row_bytes - begin;
    const int64_t to_vector_end = first_of(i) + kBytes - begin;
    const int64_t count = to_row_end < to_vector_end ? to_row_end : to_vector_end;
    copy_bytes<kBytes>(src + i * src_step + begin, dst + i * dst_step + begin,
                       static_cast<int>(count < 0 ? 0 : count));
  }
}

// The grid copies `rows` in tiles of kUnroll vectors per thread. Either `num_lanes` threads (a
// power of two) work side by side on a row, and a thread's vectors lie below each other in kUnroll
// rows; or all threads of the thread block work on one row, and a thread's vectors lie along that
// row. Needs (src - dst) % sizeof(Vector) == 0 in every row.
template <typename Vector, int kThreads, int kUnroll, bool kStreaming>
__device__ void copy_vectors(const Rows& rows, int num_lanes) {
  constexpr int kBytes = sizeof(Vector);
  // Vectors of several rows: possible only where all rows begin at the same offset in a vector.
  const bool goes_down =
      num_lanes < kThreads && kThreads / num_lanes * rows.src_stride % kBytes == 0;
  const int lanes = goes_down ? num_lanes : kThreads;
  const int row_step = goes_down ? kThreads / num_lanes : 0;
  const int byte_step = goes_down ? 0 : kThreads * kBytes;
  const int64_t tile_rows = goes_down ? kUnroll * row_step : 1;
  const int64_t tile_vectors = goes_down ? num_lanes : kUnroll * kThreads;
  const int64_t num_vectors = ceil_div<int64_t>(rows.row_bytes + kBytes - 1, kBytes);

  for (int64_t row = blockIdx.y * tile_rows; row < rows.num_rows; row += gridDim.y * tile_rows) {
    const int64_t thread_row = row + threadIdx.x / lanes;
    const uint64_t begin = reinterpret_cast<uint64_t>(rows.src + thread_row * rows.src_stride);
    const int64_t misalignment = begin % kBytes;
    for (int64_t vector = blockIdx.x * tile_vectors; vector < num_vectors;
         vector += gridDim.x * tile_vectors) {
      const int64_t first = (vector + threadIdx.x % lanes) * kBytes - misalignment;
      copy_unrolled<Vector, kUnroll, kStreaming>(rows, thread_row, row_step, first, byte_step);
    }
  }
}

// Copies with the widest vectors for which the source and the destination have the same alignment.
template <int kThreads, int kUnroll, bool kStreaming>
__device__ void copy_rows(const Rows& rows, int num_lanes) {
  const uint64_t skew = reinterpret_cast<uint64_t>(rows.src) - reinterpret_cast<uint64_t>(rows.dst);
  const uint64_t drift = rows.num_rows > 1 ? rows.src_stride - rows.dst_stride : 0;
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

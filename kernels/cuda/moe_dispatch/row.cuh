// A row as it travels: the token's activations in 16 or 8 bits, then words, which are the scales of
// float8 and the weights of the token's experts.
#pragma once

#include <kernelcat/quantize.cuh>

namespace kernelcat {

template <bool kFloat8>
struct RowShape {
  int hidden, top_k, data_vectors, num_scales;

  __device__ __forceinline__ RowShape(int hidden, int top_k)
      : hidden(hidden),
        top_k(top_k),
        data_vectors(hidden / (kFloat8 ? 16 : 8)),
        num_scales(kFloat8 ? ceil_div(hidden, kScaleBlock) : 0) {}

  __device__ __forceinline__ int num_words() const { return num_scales + top_k; }
  __device__ __forceinline__ int word_vectors() const { return ceil_div(num_words(), 4); }
  __device__ __forceinline__ int num_vectors() const { return data_vectors + word_vectors(); }
};

// The rows of this rank's receive buffer.
template <bool kFloat8>
struct ReceivedRows {
  uint4* rows;   // (num_rows, data_vectors)
  float* scale;  // (num_scales, num_rows)
  float* gates;  // (num_rows, top_k)
  int num_rows;

  // Stores vector `place` of a row that has travelled.
  __device__ __forceinline__ void store(const RowShape<kFloat8>& shape, int row, int place,
                                        const uint4& vector) const {
    if (place < shape.data_vectors) {
      rows[static_cast<int64_t>(row) * shape.data_vectors + place] = vector;
      return;
    }
    const float* values = reinterpret_cast<const float*>(&vector);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int word = 4 * (place - shape.data_vectors) + i, slot = word - shape.num_scales;
      if (word < shape.num_scales) {
        scale[static_cast<int64_t>(word) * num_rows + row] = values[i];
      } else if (slot < shape.top_k) {
        gates[static_cast<int64_t>(row) * shape.top_k + slot] = values[i];
      }
    }
  }
};

constexpr int kRowUnroll = 4;   // vectors that a thread loads at once
constexpr int kScaleLanes = 8;  // lanes side by side on the 128 elements of a scale

// What becomes a vector of a row: 16 bytes of x, or 16 elements that are quantized.
template <typename T, bool kFloat8>
struct SourceVector {
  static constexpr int kParts = kFloat8 ? 2 : 1;
  uint4 parts[kParts];

  // Loads what becomes vector `place` of x (hidden,); from `num_vectors` on there are zeros.
  __device__ __forceinline__ void load(const T* x, int place, int num_vectors) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      parts[i] = {};
      if (place < num_vectors) parts[i] = reinterpret_cast<const uint4*>(x)[kParts * place + i];
    }
  }

  // The vector on the wire. In float8 the lanes of a warp call this together for neighbouring
  // places, and every eighth lane stores the scale of its 128 elements in `scales`.
  __device__ __forceinline__ uint4 on_wire(int place, int num_vectors, float* scales) const {
    if constexpr (kFloat8) {
      return quantized(place, num_vectors, scales);
    } else {
      return parts[0];
    }
  }

 private:
  __device__ __forceinline__ uint4 quantized(int place, int num_vectors, float* scales) const {
    const T* elements = reinterpret_cast<const T*>(parts);
    float amax = kMinAmax;
#pragma unroll
    for (int i = 0; i < 16; ++i) amax = fmaxf(amax, fabsf(to_float(elements[i])));
#pragma unroll
    for (int mask = kScaleLanes / 2; mask > 0; mask /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(0xffffffff, amax, mask));
    }
    const float inverse = inverse_of(amax);
    if (place % kScaleLanes == 0 && place < num_vectors) {
      scales[place / kScaleLanes] = scale_of(amax);
    }
    uint32_t pairs[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      pairs[i] = pack_e4m3(__fmul_rn(to_float(elements[2 * i]), inverse),
                           __fmul_rn(to_float(elements[2 * i + 1]), inverse));
    }
    return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16, pairs[4] | pairs[5] << 16,
            pairs[6] | pairs[7] << 16};
  }
};

// Gives the vectors of the activations x (hidden,) of a token to `send(place, vector)`, after the
// first of them are loaded and `begin()` was called. With kFloat8 the scales go to `words`, in
// shared memory. All threads call this together.
template <int kThreads, bool kFloat8, typename T, typename Begin, typename Send>
__device__ __forceinline__ void send_data(const RowShape<kFloat8>& shape, const T* x, float* words,
                                          Begin begin, Send send) {
  constexpr int kUnroll = kRowUnroll / SourceVector<T, kFloat8>::kParts;
  const int count = shape.data_vectors;
  for (int first = 0; first < count; first += kUnroll * kThreads) {
    const auto place = [&](int i) { return first + i * kThreads + int(threadIdx.x); };
    SourceVector<T, kFloat8> loaded[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) loaded[i].load(x, place(i), count);
    if (first == 0) begin();
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint4 vector = loaded[i].on_wire(place(i), count, words);
      if (place(i) < count) send(place(i), vector);
    }
  }
}

// This thread's vector of a row's words, at most one: scales, then weights.
template <bool kFloat8>
struct RowWords {
  float values[4];

  // Loads the `weights` (top_k,).
  __device__ __forceinline__ RowWords(const RowShape<kFloat8>& shape, const float* weights) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int slot = 4 * int(threadIdx.x) + i - shape.num_scales;
      values[i] = 0 <= slot && slot < shape.top_k ? weights[slot] : 0.0f;
    }
  }

  // Gives the vector to `send`. The scales are those in `words`, which send_data wrote before a
  // barrier.
  template <typename Send>
  __device__ __forceinline__ void send_with(const RowShape<kFloat8>& shape, const float* words,
                                            Send send) {
    const int vector = threadIdx.x;
    if (vector >= shape.word_vectors()) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (4 * vector + i < shape.num_scales) values[i] = words[4 * vector + i];
    }
    send(shape.data_vectors + vector, *reinterpret_cast<const uint4*>(values));
  }
};

}  // namespace kernelcat

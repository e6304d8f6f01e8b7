// Rows of 16-byte vectors that ranks send into slots of each other's windows, one for each token,
// without flags or signals: a word that has arrived is not zero (the idea of TensorRT-LLM's Lamport
// kernels, which give up negative zeros for it).
//
// A word travels inverted. Only a word of ones would travel as zero: it is a pair of NaNs of 16
// bits, a NaN of 32, four of 8, and travels as NaNs with another sign. The reader leaves zeros
// behind, long before the next epoch but one writes to the same half.
#pragma once

#include <kernelcat/waiting.cuh>

namespace kernelcat {

// The slots of one launch: those of a sender lie together.
struct RowSlots {
  int half, tokens, row_vectors;

  __device__ __forceinline__ uint4* of(Window* window, int sender, int token) const {
    return window->slots[half] + (static_cast<int64_t>(sender) * tokens + token) * row_vectors;
  }
};

__device__ __forceinline__ uint32_t word_on_wire(uint32_t word) {
  return word == ~0u ? 1u << 31 : ~word;
}

__device__ __forceinline__ void send_to_slot(uint4* place, const uint4& vector) {
  store_words(place, {word_on_wire(vector.x), word_on_wire(vector.y), word_on_wire(vector.z),
                      word_on_wire(vector.w)});
}

// Takes kCount vectors, which travel together, out of their slots. Vector i comes from rank
// `sender(i)` to `place(i)`; where that is null, `vectors[i]` stays as it is.
template <int kCount, typename Place, typename Sender>
__device__ __forceinline__ void take_from_slots(uint4 (&vectors)[kCount], Waiting& waiting,
                                                Place place, Sender sender) {
  waiting.until_none([&] {
    int missing = -1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (place(i) == nullptr) continue;
      const uint4 found = load_words(place(i));
      if (!found.x || !found.y || !found.z || !found.w) missing = sender(i);
      vectors[i] = {~found.x, ~found.y, ~found.z, ~found.w};
    }
    return missing;
  });
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (place(i) != nullptr) *place(i) = {};
  }
}

}  // namespace kernelcat

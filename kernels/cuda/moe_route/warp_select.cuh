// One warp selects the experts of one token.
#pragma once

#include <kernelcat/sync.cuh>
#include <kernelcat/warp_sum.cuh>

#include "scores.cuh"

namespace kernelcat {

constexpr uint32_t kAllLanes = 0xffffffff;

// Unsigned integers in the order of floats; -0 and 0 give the same integer. 0 belongs to no float
// but NaNs.
__device__ __forceinline__ uint32_t ordered_bits(float value) {
  const int bits = __float_as_int(value + 0.0f);
  return static_cast<uint32_t>(bits ^ (bits >> 31 | 0x80000000));
}

__device__ __forceinline__ float from_ordered_bits(uint32_t bits) {
  return __uint_as_float(bits ^ (bits >> 31 ? 0x80000000 : 0xffffffff));
}

// Which experts a lane has: vectors of kVector consecutive experts, neighbouring lanes side by
// side.
template <int kPerLane, int kVector>
struct LaneExperts {
  static_assert(kPerLane % kVector == 0);
  static __device__ __forceinline__ int at(int i) {
    return i / kVector * (kWarpThreads * kVector) + lane_index() * kVector + i % kVector;
  }
};

template <int kBytes>
struct WordsOf;
template <>
struct WordsOf<2> {
  using Type = uint16_t;
};
template <>
struct WordsOf<4> {
  using Type = uint32_t;
};
template <>
struct WordsOf<8> {
  using Type = uint2;
};
template <>
struct WordsOf<16> {
  using Type = uint4;
};

// A token's logits in the registers of a warp, -infinity beyond the last expert.
template <typename T, int kPerLane, int kVector>
struct LaneLogits {
  using Vector = typename WordsOf<kVector * sizeof(T)>::Type;
  Vector vectors[kPerLane / kVector];

  // `row` is (experts,); experts is a multiple of kVector.
  __device__ __forceinline__ void load(const T* row, int experts) {
#pragma unroll
    for (int i = 0; i < kPerLane; i += kVector) {
      const int expert = LaneExperts<kPerLane, kVector>::at(i);
      if (expert < experts) {
        vectors[i / kVector] = *reinterpret_cast<const Vector*>(row + expert);
      }
    }
  }

  __device__ __forceinline__ float at(int i, int experts) const {
    const T* elements = reinterpret_cast<const T*>(vectors);
    const bool is_inside = LaneExperts<kPerLane, kVector>::at(i) < experts;
    return is_inside ? to_float(elements[i]) : -kInfinity;
  }
};

// Groups of consecutive experts, of which a token may use the best `top_groups`.
struct ExpertGroups {
  int size, num_groups, top_groups;
  uint32_t inverse_size;  // 2^20 / size, rounded up: exact for up to 512 experts

  static __device__ __forceinline__ ExpertGroups of_size(int size, int experts, int top_groups) {
    return {size, experts / size, top_groups, ((1u << 20) + size - 1) / size};
  }

  __device__ __forceinline__ int of(int expert) const { return expert * inverse_size >> 20; }

  // A bit for each group that the token may use. `scores` is (experts,) in shared memory, of which
  // lane g reads group g: the lanes start at different experts, so that banks differ.
  __device__ __forceinline__ uint32_t select(const float* scores) const {
    float best = -kInfinity, second = -kInfinity;
    const int group = lane_index();
    if (group < num_groups) {
      int next = group % size;
      for (int i = 0; i < size; ++i) {
        const float score = scores[group * size + next];
        second = fmaxf(second, fminf(best, score));
        best = fmaxf(best, score);
        next = next + 1 == size ? 0 : next + 1;
      }
    }
    const float sum = size == 1 ? best : best + second;
    int num_better = 0;
    for (int other = 0; other < num_groups; ++other) {
      const float value = __shfl_sync(kAllLanes, sum, other);
      num_better += value > sum || (value == sum && other < group);
    }
    return __ballot_sync(kAllLanes, group < num_groups && num_better < top_groups);
  }
};

// The keys of a warp's token: ordered bits of selection scores, 0 for experts that are taken or
// that the token may not use.
template <int kPerLane, int kVector>
struct LaneKeys {
  using Experts = LaneExperts<kPerLane, kVector>;
  uint32_t keys[kPerLane];

  // Takes out the best expert, the lowest of equal ones; the same in all lanes.
  __device__ __forceinline__ int take_best() {
    uint32_t lane_best = keys[0];
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) lane_best = max(lane_best, keys[i]);
    const uint32_t best = __reduce_max_sync(kAllLanes, lane_best);
    uint32_t lowest = kAllLanes;
#pragma unroll
    for (int i = kPerLane - 1; i >= 0; --i) {
      if (keys[i] == best) lowest = Experts::at(i);
    }
    lowest = __reduce_min_sync(kAllLanes, lowest);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (Experts::at(i) == lowest) keys[i] = 0;
    }
    return static_cast<int>(lowest);
  }

  // Takes out `expert`; nothing for a negative number.
  __device__ __forceinline__ void remove(int expert) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (Experts::at(i) == expert) keys[i] = 0;
    }
  }

  // Whether no expert is left; the same in all lanes.
  __device__ __forceinline__ bool is_empty() const {
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) any |= keys[i];
    return __ballot_sync(kAllLanes, any != 0) == 0;
  }
};

// What the weights of a token are relative to.
struct WeightScale {
  float max_logit = -kInfinity;
  float total = 1.0f;  // the sum over all experts, where weights are relative to that
};

template <Score kScore, bool kRenormalize, typename T, int kPerLane, int kVector>
__device__ __forceinline__ WeightScale weight_scale(const LaneLogits<T, kPerLane, kVector>& logits,
                                                    int experts) {
  WeightScale scale;
  if constexpr (kScore == Score::kSoftmax) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      scale.max_logit = fmaxf(scale.max_logit, logits.at(i, experts));
    const uint32_t best = __reduce_max_sync(kAllLanes, ordered_bits(scale.max_logit));
    scale.max_logit = from_ordered_bits(best);
    if constexpr (!kRenormalize) {
      scale.total = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        scale.total += unscaled_weight<kScore>(logits.at(i, experts), scale.max_logit);
      }
      scale.total = warp_sum(scale.total);
    }
  }
  return scale;
}

// The keys of a token. `scratch` is (experts,) in shared memory and belongs to the warp, for
// kGrouped.
template <Score kScore, bool kGrouped, typename T, int kPerLane, int kVector>
__device__ __forceinline__ LaneKeys<kPerLane, kVector> make_keys(
    const LaneLogits<T, kPerLane, kVector>& logits, const float* correction, int experts,
    const ExpertGroups& groups, float* scratch) {
  using Experts = LaneExperts<kPerLane, kVector>;
  LaneKeys<kPerLane, kVector> lane;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = Experts::at(i);
    lane.keys[i] = 0;
    if (expert < experts) {
      const float score = selection_score<kScore>(logits.at(i, experts), correction, expert);
      lane.keys[i] = ordered_bits(score);
      if constexpr (kGrouped) scratch[expert] = score;
    }
  }
  if constexpr (kGrouped) {
    __syncwarp();
    const uint32_t selected = groups.select(scratch);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (!(selected >> groups.of(Experts::at(i)) & 1)) lane.keys[i] = 0;
    }
  }
  return lane;
}

// The weight of the lane's expert, 0 for a negative expert; with kRenormalize relative to the
// experts of all lanes. `row` is the token's logits (experts,).
template <Score kScore, bool kRenormalize, typename T>
__device__ __forceinline__ float weigh(const T* row, int expert, WeightScale scale, float scaling) {
  float weight = 0.0f;
  if (expert >= 0) weight = unscaled_weight<kScore>(to_float(row[expert]), scale.max_logit);
  if constexpr (kRenormalize) scale.total = warp_sum(weight) + 1e-20f;
  return weight * (scaling / scale.total);
}

}  // namespace kernelcat
